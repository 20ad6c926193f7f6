"""NumPy: the reference backend, with which the tests compare all other backends."""

from collections.abc import Sequence
from typing import Any

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.numpy.backend import NumpyBackend
from lockstep.backends.numpy.network import SGD, Dense, DenseCrossEntropy, DenseSquaredError

__all__ = ["SGD", "Dense", "DenseCrossEntropy", "DenseSquaredError", "NumpyBackend"]

joins = True
compiles = False


def available() -> list[str]:
    """Returns an empty list, because numpy has no accelerators."""
    return []


def name(device: Any) -> str:
    """Returns the device as text, because numpy has no device objects."""
    return str(device)


def initial_seed() -> int:
    """Returns 0, because each model draws its weights from its own seed."""
    return 0


def variables(devices: Sequence[str]) -> dict[str, str]:
    """Returns no environment variables, because numpy needs none."""
    return {}


def adopt(recipe: Recipe) -> Recipe:
    """Returns the recipe unchanged, because the script can call its `Dense` model directly."""
    return recipe


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Creates a backend with one replica on each device."""
    return NumpyBackend(recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """Returns one list per device, i.e. one process each as for PyTorch, so that process tests need no framework."""
    return [[device] for device in devices]
