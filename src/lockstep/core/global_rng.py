"""Seeds and restores the process-wide random number generators of Python, numpy and the imported frameworks.

Code that takes no seed draws from these generators. Lockstep seeds them while such code runs and restores them
afterwards, so that the numbers depend on the run's seed and the numbers that the script draws do not change.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from lockstep.core import framework_hooks, seeds

States = tuple[Any, Any, list[tuple[framework_hooks.FrameworkHooks, Any]]]


def get_states() -> States:
    """Returns a copy of the states of all process-wide generators, for `set_states`."""
    frameworks = [(hooks, hooks.get_rng_state()) for hooks in framework_hooks.list_imported()]
    return random.getstate(), np.random.get_state(), frameworks


def set_states(states: States) -> None:
    """Restores states that `get_states` returned. Frameworks that were imported since then keep their state."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    for hooks, state in states[2]:
        hooks.set_rng_state(state)


def seed_all(value: int) -> None:
    """Seeds all process-wide generators from one integer.

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
    """Restores the states of all process-wide generators at the end of the block; yields the states to be restored."""
    before = get_states()
    try:
        yield before
    finally:
        set_states(before)


def has_changed(before: States) -> bool:
    """Returns whether a number has been drawn from a process-wide generator since `before` was read."""
    now = get_states()
    if before[0] != now[0] or before[1][2:] != now[1][2:] or not np.array_equal(before[1][1], now[1][1]):
        return True
    return not all(hooks.is_equal_rng_state(state, hooks.get_rng_state()) for hooks, state in before[2])


class SeparateGenerators:
    """A second set of states of the process-wide generators, which are used inside `with` blocks only.

    Each block continues from the states at the end of the last block; the script's own states are restored after it.

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

    def iterate(
        self, iterator: Iterator[Any], around_each: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[Any]:
        """Yields the iterator's items, each computed with these states in use and inside `around_each()`."""
        end = object()
        while True:
            with self, around_each():
                item = next(iterator, end)
            if item is end:
                return
            yield item


def seed_loader(loader: Any, seed: int, epoch: int) -> SeparateGenerators:
    """Returns the generators for an epoch of a loader, seeded from (seed, epoch).

    Also seeds the generators that the loader and its samplers have as the attribute `generator`.
    """
    value = seeds.derive("loader", seed, epoch)
    for owner in _list_samplers(loader):
        generator: Any = getattr(owner, "generator", None)
        if hasattr(generator, "manual_seed"):
            generator.manual_seed(value)
    return SeparateGenerators(value)


def _list_samplers(owner: Any) -> Iterator[Any]:
    """Yields a loader or sampler, and then the samplers that it uses."""
    yield owner
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(owner, name, None)
        if sampler is not None:
            yield from _list_samplers(sampler)
