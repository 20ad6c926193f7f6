"""Loaders: iterables of whole batches, read in the script's own process as they are.

A loader that has `state_dict` and `load_state_dict` is brought to a batch by these;
of any other, what comes before is read and dropped.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from lockstep.core import batches, generators, plain
from lockstep.errors import BatchError

BY_DROPPING = "by reading and dropping"
BY_STATE = "by its state_dict"
_OWN = ("numpy", "torch", "jax", "jaxlib")  # whose arrays go to a backend as they are


class IterableSource:
    """Any iterable of batches, as it is. A generator can be read once.

    >>> list(IterableSource([np.zeros(2), np.ones(2)]).epoch(0))
    [array([0., 0.]), array([1., 1.])]
    """

    num_examples: int | None = None
    batch_size: int | None = None
    endless = False
    resumes = BY_DROPPING

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self.once = iter(iterable) is iterable
        length = getattr(iterable, "__len__", None)
        self.num_steps: int | None = length() if length is not None else None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The iterable's batches; a generator goes on where it stopped."""
        found = map(own, islice(iter(self._iterable), start, None))
        return checked(found, self.once and index > 0, index)

    def state(self) -> Any:
        """An iterable says nothing."""
        return None


class StatefulSource:
    """A loader that can be asked where it stands, and be brought there."""

    num_examples: int | None = None
    endless = once = False
    resumes = BY_STATE

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        try:
            self.num_steps: int | None = len(loader)
        except TypeError:
            self.num_steps = None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The loader's batches, its generators seeded from (seed, epoch) and kept apart from the script's."""
        apart = generators.of_loader(self._loader, self._seed, index)
        if state is not None:
            with apart:
                self._loader.load_state_dict(plain.native(state))
            if not start:  # it may hold the loader's generators as the last epoch left them
                apart = generators.of_loader(self._loader, self._seed, index)
        with apart:
            iterator = iter(self._loader)
        return map(own, islice(apart.over(iterator), 0 if state is not None else start, None))

    def state(self) -> Any:
        """What the loader's own `state_dict` says, tensors as numpy."""
        return plain.plain(self._loader.state_dict(), "state_dict()", plain.marked)


def of(data: Any, seed: int) -> IterableSource | StatefulSource | None:
    """The source for an iterable of batches; None for anything else."""
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        return None
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        return StatefulSource(data, seed)
    return IterableSource(data)


def own(batch: Any) -> Any:
    """The batch in tuples and dicts, arrays of frameworks that are no backend's as numpy."""

    def leaf(value: Any) -> Any:
        if not hasattr(value, "__array__") or any(
            kind.__module__.split(".")[0] in _OWN for kind in type(value).__mro__
        ):
            return value
        return np.asarray(value)

    return batches.transform(batches.top(batch), leaf)


def checked(found: Iterator[Any], used: bool, epoch: int) -> Iterator[Any]:
    """The same batches; raises where there are none and the iterable was `used` in an earlier epoch."""
    empty = True
    for batch in found:
        empty = False
        yield batch
    if empty and used:
        raise BatchError(
            f"An epoch holds at least one batch. The generator was used up before epoch {epoch + 1}. "
            "Give a list, a loader or arrays, or use epochs=1 or steps_per_epoch."
        )
