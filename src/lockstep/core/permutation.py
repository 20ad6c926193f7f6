"""Permutations: an order of n things, any part of which is found without the rest.

A few rounds of keyed multiplications, additions and shifts, each of which can be
undone, shuffle the numbers below the next power of two; one that lands at n or
above is shuffled again until it lands below ("cycle walking"). So position
700,000,000 of an epoch is found in no time and nobody keeps a list.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from lockstep.core import seeds

_ROUNDS = 8  # with fewer, the orders of a handful of examples are not equally likely
_CHUNK = 4096  # positions worked out at once: numpy's cost per call is spread over them


class Permutation:
    """The numbers from 0 to `num_examples` - 1 in an order that `key` names.

    >>> Permutation(7, 5).at(np.arange(5))
    array([3, 0, 4, 2, 1])
    >>> Permutation(7, 10**12).between(700_000_000, 700_000_002)
    array([368487997480, 699869380437])
    """

    def __init__(self, key: int, num_examples: int) -> None:
        assert 1 <= num_examples < 2**62
        self._num_examples = num_examples
        bits = (num_examples - 1).bit_length()
        self._mask = np.uint64(2**bits - 1)
        self._shift = np.uint64(max(1, (bits + 1) // 2))
        words = [seeds.derive("permutation", key, number) for number in range(2 * _ROUNDS)]
        self._factors = [np.uint64(word | 1) & self._mask for word in words[::2]]  # odd, so it can be undone
        self._addends = [np.uint64(word) & self._mask for word in words[1::2]]
        self._chunk: tuple[int, NDArray[np.int64]] = -1, np.empty(0, np.int64)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands at these positions."""
        values = self._mixed(positions.astype(np.uint64))
        above = np.flatnonzero(values >= self._num_examples)
        while len(above):
            values[above] = self._mixed(values[above])
            above = above[values[above] >= self._num_examples]
        return values.astype(np.int64)

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """What stands from position `start` up to `stop`; cheap when asked for piece by piece."""
        parts = []
        while start < stop:
            number, offset = divmod(start, _CHUNK)
            part = self._numbered(number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate([np.empty(0, np.int64), *parts])  # a copy: frameworks warn of memory they may not write

    def _numbered(self, number: int) -> NDArray[np.int64]:
        """A chunk; the last one is kept. Threads may both work it out, and get the same."""
        kept, chunk = self._chunk
        if kept != number:
            first = number * _CHUNK
            chunk = self.at(np.arange(first, min(first + _CHUNK, self._num_examples)))
            chunk.flags.writeable = False
            self._chunk = number, chunk
        return chunk

    def _mixed(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The numbers below the next power of two, each somewhere else."""
        for factor, addend in zip(self._factors, self._addends, strict=True):
            values = values * factor
            values += addend
            values &= self._mask
            values ^= values >> self._shift
        return values


@functools.lru_cache(maxsize=64)
def order(seed: int, epoch: int, num_examples: int) -> Permutation:
    """The order in which epoch `epoch` visits the examples.

    >>> order(0, 1, 6).between(0, 6)
    array([5, 0, 4, 3, 2, 1])
    """
    return Permutation(seeds.derive("order", seed, epoch), num_examples)
