"""TensorFlow: one process drives all of its devices, with models that are functions of tf.Variables."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.tensorflow.backend import TensorflowBackend
from lockstep.backends.tensorflow.function_program import FunctionProgram

__all__ = ["TensorflowBackend", "adopt", "available", "initial_seed", "name", "open", "processes", "variables"]

joins = True
compiles = False


def available() -> list[str]:
    """Returns the names of this host's GPUs."""
    return [f"gpu:{index}" for index, _ in enumerate(tf.config.list_physical_devices("GPU"))]


def name(device: Any) -> str:
    """Returns a device's name without the path in front of it, e.g. `GPU:0` for `/device:GPU:0`."""
    return str(device.name).partition("device:")[2]


def initial_seed() -> int:
    """Returns the seed that `tf.random.set_seed` was given; 0 if it was not called."""
    return int(context.global_seed() or 0)


def variables(devices: Sequence[str]) -> dict[str, str]:
    """Returns no environment variables, because TensorFlow was already initialized when the model was created."""
    return {}


def adopt(recipe: Recipe) -> Recipe:
    """Returns the recipe unchanged, because training writes to the script's own variables."""
    return recipe


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Returns the backend of this process, with one replica on each device."""
    return TensorflowBackend(FunctionProgram(recipe), recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """Returns one list with every device, because one process drives them all."""
    return [list(devices)]
