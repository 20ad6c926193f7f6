"""Random permutations of n numbers whose entry at any position can be computed directly, without storing a list.

Several rounds of invertible multiplications, additions and shifts permute the numbers below the next power of two. A
result of n or more is permuted again until it is below n ("cycle walking").
"""

import functools

import numpy as np
from numpy.typing import NDArray

from lockstep.core import seeds

_ROUNDS = 8  # with fewer rounds the permutations of a few examples are not equally likely
_CHUNK = 4096  # the number of positions computed at once, because each call of numpy has a fixed cost


class Permutation:
    """The numbers from 0 to `num_examples` - 1 in an order that depends on `key`.

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
        self._factors = [np.uint64(word | 1) & self._mask for word in words[::2]]  # odd: invertible
        self._addends = [np.uint64(word) & self._mask for word in words[1::2]]
        self._chunk: tuple[int, NDArray[np.int64]] = -1, np.empty(0, np.int64)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the entries of the permutation at these positions."""
        values = self._mix(positions.astype(np.uint64))
        above = np.flatnonzero(values >= self._num_examples)
        while len(above):
            values[above] = self._mix(values[above])
            above = above[values[above] >= self._num_examples]
        return values.astype(np.int64)

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the entries of the permutation from `start` to `stop`; fast for consecutive ranges."""
        parts = []
        while start < stop:
            number, offset = divmod(start, _CHUNK)
            part = self._get_chunk(number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate([np.empty(0, np.int64), *parts])  # a copy, because frameworks warn about read-only memory

    def _get_chunk(self, number: int) -> NDArray[np.int64]:
        """Returns a chunk of the permutation, and caches it; without a lock, because all threads compute the same."""
        stored, chunk = self._chunk
        if stored != number:
            first = number * _CHUNK
            chunk = self.at(np.arange(first, min(first + _CHUNK, self._num_examples)))
            chunk.flags.writeable = False
            self._chunk = number, chunk
        return chunk

    def _mix(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permutes the numbers below the next power of two."""
        for factor, addend in zip(self._factors, self._addends, strict=True):
            values = values * factor
            values += addend
            values &= self._mask
            values ^= values >> self._shift
        return values


@functools.lru_cache(maxsize=64)
def order(seed: int, epoch: int, num_examples: int) -> Permutation:
    """Returns the order in which an epoch visits the examples, as a permutation that depends on (seed, epoch).

    >>> order(0, 1, 6).between(0, 6)
    array([5, 0, 4, 3, 2, 1])
    """
    return Permutation(seeds.derive("order", seed, epoch), num_examples)
