"""Generators: the random state that a whole process shares, kept apart from the script's.

Python's `random`, numpy's global generator and torch's default one on the CPU are
drawn from by code that was never told a seed. Torch is only looked for among the
modules already imported.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from lockstep.core import seeds

States = tuple[Any, ...]


def states() -> States:
    """The states of the global generators, as `put` takes them."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.default_generator.get_state()


def put(kept: States) -> None:
    """Puts the states back."""
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    if kept[2] is not None:
        sys.modules["torch"].default_generator.set_state(kept[2])


def seed(value: int) -> None:
    """Seeds them all.

    >>> with kept():
    ...     seed(1)
    ...     one = random.random()
    ...     seed(1)
    ...     random.random() == one
    True
    """
    random.seed(value)
    np.random.seed(value % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(value)


@contextmanager
def kept() -> Iterator[States]:
    """Inside, the generators may be seeded at will; afterwards they are as they were."""
    before = states()
    try:
        yield before
    finally:
        put(before)


def moved(before: States) -> bool:
    """Whether somebody has drawn from a generator since."""
    now = states()
    alike = before[0] == now[0] and before[1][2:] == now[1][2:] and np.array_equal(before[1][1], now[1][1])
    return not alike or (before[2] is not None and bytes(before[2].numpy()) != bytes(now[2].numpy()))


class Apart:
    """Generators of one's own: seeded once, in force inside `with`, and carried from one `with` to the next.

    >>> apart = Apart(1)
    >>> with apart:
    ...     drawn = random.random()
    >>> with apart:
    ...     random.random() == drawn
    False
    """

    def __init__(self, value: int) -> None:
        with kept():
            seed(value)
            self._own = states()

    def __enter__(self) -> None:
        self._script = states()
        put(self._own)

    def __exit__(self, *exception: object) -> None:
        self._own = states()
        put(self._script)

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """What the iterator gives, each item made with these generators."""
        end = object()
        while True:
            with self:
                item = next(iterator, end)
            if item is end:
                return
            yield item


def of_loader(loader: Any, seed: int, epoch: int) -> Apart:
    """The generators of a loader's epoch; those that it and its samplers hold themselves are seeded, too."""
    value = seeds.derive("loader", seed, epoch)
    for owner in _with_samplers(loader):
        generator: Any = getattr(owner, "generator", None)
        if hasattr(generator, "manual_seed"):
            generator.manual_seed(value)
    return Apart(value)


def _with_samplers(owner: Any) -> Iterator[Any]:
    """A loader, its samplers, and those that a sampler is built on."""
    yield owner
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(owner, name, None)
        if sampler is not None:
            yield from _with_samplers(sampler)
