"""PyTorch: one process per device, each with one replica."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.torch.backend import TorchBackend

joins = True
compiles = True


def available() -> list[str]:
    """Returns the GPUs of this host."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def name(device: Any) -> str:
    """Returns a device's name as PyTorch writes it, e.g. `cuda:0`."""
    return str(device)


def initial_seed() -> int:
    """Returns the seed of `torch.manual_seed`; without one, the number that torch has drawn at its import."""
    return torch.initial_seed()


def variables(devices: Sequence[str]) -> dict[str, str]:
    """Returns the environment variable for a fixed cuBLAS workspace, without which cuBLAS may give other bits."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if devices[0].startswith("cuda") else {}


def adopt(recipe: Recipe) -> Recipe:
    """Returns the recipe with a note that parameter groups may get new keys, as schedulers and scripts add them."""
    return replace(recipe, habits=replace(recipe.habits, open_groups=True))


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Returns the backend of one process, with its one replica."""
    (device,) = devices
    return TorchBackend(recipe, device)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """Returns one process per device, because Python's lock and torch's global generator are per process."""
    return [[device] for device in devices]
