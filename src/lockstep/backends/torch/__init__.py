"""PyTorch: one process per device, each with one replica."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.torch.backend import TorchBackend

joins = True


def available() -> list[str]:
    """The GPUs of this host."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def name(device: Any) -> str:
    """As PyTorch writes a `torch.device`."""
    return str(device)


def initial_seed() -> int:
    """The seed of `torch.manual_seed`; without one, the number that torch has drawn when it was started."""
    return torch.initial_seed()


def variables(devices: Sequence[str]) -> dict[str, str]:
    """cuBLAS repeats its bits only with a workspace of fixed size."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if devices[0].startswith("cuda") else {}


def adopt(recipe: Recipe) -> Recipe:
    """The script's own model is what it calls. Schedulers and scripts add to the groups of torch's optimizers."""
    return replace(recipe, habits=replace(recipe.habits, open_groups=True))


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """The backend of one process, with its one replica."""
    (device,) = devices
    return TorchBackend(recipe, device)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """One process per device: Python's lock and torch's process-wide generator leave no other way."""
    return [[device] for device in devices]
