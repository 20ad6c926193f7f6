"""MXNet: one process drives every context."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mxnet as mx

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.mxnet.backend import MxnetBackend
from lockstep.backends.mxnet.cross_entropy import CrossEntropy
from lockstep.backends.mxnet.optimizer import made

__all__ = ["CrossEntropy", "MxnetBackend"]

joins = False  # its engine has no wire to another process


def available() -> list[str]:
    """The GPUs of this host."""
    return [f"gpu:{index}" for index in range(mx.context.num_gpus())]


def name(device: Any) -> str:
    """A context's kind and number."""
    return f"{device.device_type}:{device.device_id}"


def initial_seed() -> int:
    """0: the seed of `mx.random.seed` cannot be read."""
    return 0


def variables(devices: Sequence[str]) -> dict[str, str]:
    """cuDNN tries algorithms out and takes the fastest, which is not always the same one."""
    return {} if devices[0].startswith("cpu") else {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0"}


def adopt(recipe: Recipe) -> Recipe:
    """The recipe with an optimizer object where its name was given."""
    return replace(recipe, optimizer=made(recipe.optimizer))


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """A backend with one replica on each device."""
    return MxnetBackend(recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """One process: MXNet's engine has threads of its own for every context."""
    return [list(devices)]
