"""TensorFlow: one process drives all of its devices; a shard reads variables and writes none."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.tensorflow.backend import TensorflowBackend
from lockstep.backends.tensorflow.function_model import Function

__all__ = ["TensorflowBackend", "adopt", "available", "initial_seed", "name", "open", "processes", "variables"]

joins = True


def available() -> list[str]:
    """The GPUs of this host."""
    return [f"gpu:{index}" for index, _ in enumerate(tf.config.list_physical_devices("GPU"))]


def name(device: Any) -> str:
    """Without the path before it: `/device:GPU:0`."""
    return str(device.name).partition("device:")[2]


def initial_seed() -> int:
    """The seed of `tf.random.set_seed`; 0 without one."""
    return int(context.global_seed() or 0)


def variables(devices: Sequence[str]) -> dict[str, str]:
    """None: TensorFlow was awake before us."""
    return {}


def adopt(recipe: Recipe) -> Recipe:
    """The script's own function and variables are what it calls."""
    return recipe


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """The backend of this process, with one replica on each device."""
    return TensorflowBackend(Function(recipe), recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """One process drives them all."""
    return [list(devices)]
