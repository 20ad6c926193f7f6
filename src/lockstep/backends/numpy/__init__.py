"""NumPy: the reference backend, the oracle of the tests and the shortest answer to "what does a backend do?"."""

from collections.abc import Sequence
from typing import Any

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.numpy.backend import NumpyBackend
from lockstep.backends.numpy.network import SGD, CrossEntropy, Dense, SquaredError

__all__ = ["SGD", "CrossEntropy", "Dense", "NumpyBackend", "SquaredError"]

joins = True


def available() -> list[str]:
    """numpy has only the CPU."""
    return []


def name(device: Any) -> str:
    """NumPy has no devices of its own."""
    return str(device)


def initial_seed() -> int:
    """0: the models draw their weights with a seed of their own."""
    return 0


def variables(devices: Sequence[str]) -> dict[str, str]:
    """None."""
    return {}


def adopt(recipe: Recipe) -> Recipe:
    """The script's own model is what it calls."""
    return recipe


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """A backend with one replica on each device."""
    return NumpyBackend(recipe, devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """One process per device, as PyTorch has it, so that tests of processes need no framework."""
    return [[device] for device in devices]
