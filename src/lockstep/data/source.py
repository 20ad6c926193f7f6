"""Sources: the batches of an epoch, the same for any number of devices.

A source gives whole batches. Which example comes when is a pure function of
(seed, epoch), so an epoch can be read again from anywhere.
"""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, Protocol

from lockstep.core import batches, seeds
from lockstep.errors import BatchError


class Source(Protocol):
    """Where batches come from."""

    num_examples: int | None
    num_steps: int | None
    batch_size: int | None

    def epoch(self, index: int) -> Iterator[Any]:
        """The batches of epoch `index`."""


class ArraySource:
    """Arrays in memory, gathered by index.

    >>> import numpy as np
    >>> source = ArraySource((np.arange(5), np.arange(5) * 10), batch_size=2, shuffle=False, seed=0)
    >>> [batch[1].tolist() for batch in source.epoch(0)]
    [[0, 10], [20, 30], [40]]
    """

    def __init__(self, arrays: Any, batch_size: int, shuffle: bool, seed: int) -> None:
        self._arrays = arrays
        self.batch_size: int | None = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.num_examples: int | None = batches.count(arrays)
        self.num_steps: int | None = -(-self.num_examples // batch_size)

    def epoch(self, index: int) -> Iterator[Any]:
        """The batches of the epoch, in the order of (seed, epoch) where shuffled."""
        assert self.num_examples is not None
        assert self.batch_size is not None
        order = seeds.order(self._seed, index, self.num_examples) if self._shuffle else None
        for start in range(0, self.num_examples, self.batch_size):
            stop = min(start + self.batch_size, self.num_examples)
            yield batches.select(self._arrays, slice(start, stop) if order is None else order[start:stop])


class IterableSource:
    """Any iterable of batches, as it is. A generator can be read once.

    >>> import numpy as np
    >>> list(IterableSource([np.zeros(2), np.ones(2)]).epoch(0))
    [array([0., 0.]), array([1., 1.])]
    """

    num_examples: int | None = None
    batch_size: int | None = None

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._once = iter(iterable) is iterable
        length = getattr(iterable, "__len__", None)
        self.num_steps: int | None = length() if length is not None else None

    def epoch(self, index: int) -> Iterator[Any]:
        """The iterable's batches; a generator goes on where it stopped."""
        iterator = iter(self._iterable)
        empty = True
        for batch in iterator:
            empty = False
            yield batches.top(batch)
        if empty and self._once and index:
            raise BatchError(
                f"An epoch holds at least one batch. The generator was used up before epoch {index + 1}. "
                "Give a list, a loader or arrays, or use epochs=1 or steps_per_epoch."
            )


def of(data: Any, batch_size: int, shuffle: bool, seed: int) -> Source:
    """The source for arrays, nests of arrays, or an iterable of batches."""
    if isinstance(data, dict | tuple) or batches.is_array(data):
        return ArraySource(data, batch_size, shuffle, seed)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return IterableSource(data)
    raise BatchError(
        "Data is (inputs, targets), a nest of arrays, a data set, a loader or an iterable of batches. "
        f"Got {batches.describe(data)}. Give fit((x, y), ...)."
    )


def first(source: Source, steps: int) -> list[Any]:
    """The first batches, from as many epochs as they take."""
    result: list[Any] = []
    for epoch in count():
        more = list(islice(source.epoch(epoch), steps - len(result)))
        if not more:
            raise BatchError(f"An epoch holds at least one batch. Epoch {epoch + 1} had none. Give data.")
        result += more
        if len(result) == steps:
            break
    return result
