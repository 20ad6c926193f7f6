"""The random number generators that the whole process shares, and how they are kept separate from the script's state.

Python's `random`, numpy's global generator and those of imported frameworks are used by code that takes no seed. They
can be seeded for a while and restored, so that what they give depends on the given seed and the script notices nothing.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lockstep.core import framework_hooks, seeds

States = tuple[Any, Any, list[tuple[framework_hooks.FrameworkHooks, Any]]]


def get_states() -> States:
    """Returns the states of all global generators, for `set_states`."""
    frameworks = [(hooks, hooks.get_rng_state()) for hooks in framework_hooks.list_imported()]
    return random.getstate(), np.random.get_state(), frameworks


def set_states(states: States) -> None:
    """Restores the states. A framework that was imported later keeps its state."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    for hooks, state in states[2]:
        hooks.set_rng_state(state)


def seed_all(value: int) -> None:
    """Seeds all global generators.

    >>> with restore_afterwards():
    ...     seed_all(1)
    ...     one = random.random()
    ...     seed_all(1)
    ...     random.random() == one
    True
    """
    random.seed(value)
    np.random.seed(value % 2**32)
    for hooks in framework_hooks.list_imported():
        hooks.seed_rng(value)


@contextmanager
def restore_afterwards() -> Iterator[States]:
    """Restores all global generators at the end of the block; yields their states at its start."""
    before = get_states()
    try:
        yield before
    finally:
        set_states(before)


def has_changed(before: States) -> bool:
    """Returns whether a number has been drawn from a global generator since `before`."""
    now = get_states()
    if before[0] != now[0] or before[1][2:] != now[1][2:] or not np.array_equal(before[1][1], now[1][1]):
        return True
    return not all(hooks.is_equal_rng_state(state, hooks.get_rng_state()) for hooks, state in before[2])


class SeparateGenerators:
    """States of the global generators that are in force inside `with` and continue from one `with` to the next.

    >>> separate = SeparateGenerators(1)
    >>> with separate:
    ...     drawn = random.random()
    >>> with separate:
    ...     random.random() == drawn
    False
    """

    def __init__(self, seed: int) -> None:
        with restore_afterwards():
            seed_all(seed)
            self._own = get_states()

    def __enter__(self) -> None:
        self._script = get_states()
        set_states(self._own)

    def __exit__(self, *exception: object) -> None:
        self._own = get_states()
        set_states(self._script)

    def iterate(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yields the iterator's items, each computed with these generators."""
        end = object()
        while True:
            with self:
                item = next(iterator, end)
            if item is end:
                return
            yield item


def seed_loader(loader: Any, seed: int, epoch: int) -> SeparateGenerators:
    """Returns the generators for an epoch of a loader; also seeds those that it and its samplers have as attributes."""
    value = seeds.derive("loader", seed, epoch)
    for owner in _list_samplers(loader):
        generator: Any = getattr(owner, "generator", None)
        if hasattr(generator, "manual_seed"):
            generator.manual_seed(value)
    return SeparateGenerators(value)


def _list_samplers(owner: Any) -> Iterator[Any]:
    """Yields a loader or sampler, and the samplers that it is built on."""
    yield owner
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(owner, name, None)
        if sampler is not None:
            yield from _list_samplers(sampler)
