"""Keras 3 on TensorFlow, PyTorch and JAX.

What belongs to Keras (losses, metrics, seed generators, names) is written once, with Keras's own functions, and is used
by `on_tensorflow`, `on_torch` and `on_jax`. The frameworks' backends compute shards, add partial sums and update.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from lockstep.backends.base import Backend, Module, Recipe
from lockstep.backends.keras import rng
from lockstep.backends.keras.compile_args import adopt
from lockstep.errors import MissingExtra

__all__ = ["adopt", "available", "initial_seed", "name", "open", "processes", "variables"]

joins = True
compiles = False


def available() -> list[str]:
    """Returns the accelerators of this host, as listed by the framework on which Keras runs."""
    return _import_framework().available()


def name(device: Any) -> str:
    """Returns the framework's name for a device."""
    return _import_framework().name(device)


def initial_seed() -> int:
    """Returns the seed of `keras.utils.set_random_seed`, or the framework's own seed if it was not called."""
    seed = rng.read_global_seed()
    return _import_framework().initial_seed() if seed is None else seed


def variables(devices: Sequence[str]) -> Mapping[str, str]:
    """Returns the framework's environment variables and, if there are worker processes, KERAS_BACKEND for them."""
    chosen = {"KERAS_BACKEND": keras.config.backend()} if len(processes(devices)) > 1 else {}
    return {**chosen, **_import_framework().variables(devices)}


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Returns the backend that trains a Keras model on the framework on which Keras runs."""
    recipe = adopt(recipe)
    backend: Backend = importlib.import_module(f"{__name__}.on_{keras.config.backend()}").open(recipe, devices)
    return backend


def processes(devices: Sequence[str]) -> list[list[str]]:
    """Returns the devices of each process, as the framework drives them."""
    return _import_framework().processes(devices)


def _import_framework() -> Module:
    """Returns the backend module of the framework that Keras runs on."""
    name = keras.config.backend()
    try:
        module: Any = importlib.import_module(f"lockstep.backends.{name}")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"Lockstep needs {error.name} to train Keras models on {name}, but {error.name} is not installed. "
            f'Use pip install "lockstep-train[{name}]".'
        ) from None
    return module  # type: ignore[no-any-return]
