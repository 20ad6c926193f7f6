"""Hooks through which core and data use a framework, without importing it or knowing its name.

The data may use another framework than the model: for example, a data set that transforms images with torch, for a JAX
model. Then torch's random number generator must be seeded for each example too. So `backends.registry` registers a
module of hooks for each such framework, and this module is imported after the script has imported the framework.
"""

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np


class FrameworkHooks(Protocol):
    """Protocol of the functions and types that core needs from a framework; a module implements it."""

    GENERATOR_TYPES: tuple[type, ...]
    ARRAY_TYPES: tuple[type, ...]
    ARRAY_MARK: str  # the key under which a checkpoint stores an array of this framework

    def get_default_generator(self) -> Any:
        """Returns the framework's process-wide random number generator."""

    def get_rng_state(self) -> Any:
        """Returns a copy of the state of the process-wide random number generator."""

    def set_rng_state(self, state: Any) -> None:
        """Restores the state of the process-wide random number generator."""

    def is_equal_rng_state(self, one: Any, other: Any) -> bool:
        """Returns whether two states of the random number generator are equal."""

    def seed_rng(self, seed: int) -> None:
        """Seeds the process-wide random number generator."""

    def get_num_threads(self) -> int:
        """Returns the number of threads that one operation uses."""

    def set_num_threads(self, count: int) -> None:
        """Sets the number of threads that one operation uses."""

    def to_numpy(self, array: Any) -> Any:
        """Returns a copy of the framework's array as a numpy array; raises TypeError for a type that numpy lacks."""

    def to_bytes(self, array: Any) -> Any:
        """Returns the array's bytes as a numpy array of uint8."""

    def from_numpy(self, array: Any) -> Any:
        """Returns a copy of a numpy array as an array of the framework."""


_MODULES: dict[str, str] = {}


def register(package: str, module: str) -> None:
    """Registers the module that implements `FrameworkHooks` for a package, without importing the module or package."""
    _MODULES[package] = module


def list_imported() -> list[FrameworkHooks]:
    """Returns the hooks of the registered frameworks that this process has imported."""
    return [_load(module) for package, module in _MODULES.items() if sys.modules.get(package) is not None]


def list_missing() -> list[str]:
    """Returns the registered packages that this process has not imported."""
    return [package for package in _MODULES if sys.modules.get(package) is None]


def to_numpy_or_bytes(value: Any) -> Any:
    """Returns an array of any framework as a numpy array; as a numpy array of its bytes if numpy lacks the dtype."""
    for hooks in list_imported():
        if isinstance(value, hooks.ARRAY_TYPES):
            try:
                return hooks.to_numpy(value)
            except TypeError:
                return hooks.to_bytes(value)
    return np.asarray(value)


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Makes the imported frameworks use one thread inside the block, because the number of threads can change bits."""
    before = [(hooks, hooks.get_num_threads()) for hooks in list_imported()]
    changed = [(hooks, count) for hooks, count in before if count != 1]
    for hooks, _ in changed:
        hooks.set_num_threads(1)
    try:
        yield
    finally:
        for hooks, count in changed:
            hooks.set_num_threads(count)


@functools.cache
def _load(module: str) -> FrameworkHooks:
    return cast(FrameworkHooks, importlib.import_module(module))
