"""Keras 3: one adapter over the backends that Keras itself runs on.

What is Keras's own (losses, metrics, seed generators, names) is written once, with
Keras; TensorFlow, PyTorch and JAX compute, add and step through their own backends.
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


def available() -> list[str]:
    """The accelerators of this host, as the framework beneath sees them."""
    return _beneath().available()


def name(device: Any) -> str:
    """As the framework beneath names it."""
    return _beneath().name(device)


def initial_seed() -> int:
    """The seed of `keras.utils.set_random_seed`; without one, that of the framework beneath."""
    seed = rng.global_seed()
    return _beneath().initial_seed() if seed is None else seed


def variables(devices: Sequence[str]) -> Mapping[str, str]:
    """What the framework beneath needs; and the choice of it, for processes to come."""
    chosen = {"KERAS_BACKEND": keras.config.backend()} if len(processes(devices)) > 1 else {}
    return {**chosen, **_beneath().variables(devices)}


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """The framework's own backend over the model."""
    recipe = adopt(recipe)
    backend: Backend = importlib.import_module(f"{__name__}.on_{keras.config.backend()}").open(recipe, devices)
    return backend


def processes(devices: Sequence[str]) -> list[list[str]]:
    """As the framework beneath drives its devices."""
    return _beneath().processes(devices)


def _beneath() -> Module:
    name = keras.config.backend()
    try:
        module: Any = importlib.import_module(f"lockstep.backends.{name}")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"Keras on {name} is driven with {error.name}, which is not installed. "
            f'Use pip install "lockstep-train[{name}]".'
        ) from None
    return module  # type: ignore[no-any-return]
