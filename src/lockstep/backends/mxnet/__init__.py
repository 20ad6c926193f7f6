"""MXNet: one process drives every context."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mxnet as mx

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.mxnet.backend import MxnetBackend
from lockstep.backends.mxnet.cross_entropy import CrossEntropy
from lockstep.backends.mxnet.optimizer import create_optimizer

__all__ = ["CrossEntropy", "MxnetBackend"]

joins = False  # MXNet's engine does not communicate with other processes
compiles = False


def available() -> list[str]:
    """Returns the names of this host's GPUs."""
    return [f"gpu:{index}" for index in range(mx.context.num_gpus())]


def name(device: Any) -> str:
    """Returns a context's kind and index, e.g. `gpu:1`."""
    return f"{device.device_type}:{device.device_id}"


def initial_seed() -> int:
    """Returns 0, because the seed given to `mx.random.seed` cannot be read."""
    return 0


def variables(devices: Sequence[str]) -> dict[str, str]:
    """Returns the variable that turns off cuDNN's autotuning, which may choose another algorithm in every run."""
    return {} if devices[0].startswith("cpu") else {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "0"}


def adopt(recipe: Recipe) -> Recipe:
    """Returns the recipe with an optimizer object in place of an optimizer's name."""
    return replace(recipe, optimizer=create_optimizer(recipe.optimizer))


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Creates a backend with one replica on each device."""
    return MxnetBackend(recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """Returns one list with every device, because MXNet's engine drives all contexts from one process."""
    return [list(devices)]
