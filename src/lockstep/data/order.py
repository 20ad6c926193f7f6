"""The order: which example of its base stands where in an epoch.

Shuffling, taking and repeating move examples about without looking at them. All of
it is arithmetic on positions, so any part of any epoch is found at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.permutation import order

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Shuffle:
    """Another order every epoch."""

    seed: int


@dataclass(frozen=True)
class Take:
    """Only the first ones."""

    num: int


@dataclass(frozen=True)
class Repeat:
    """One epoch after another, without end."""


Move = Shuffle | Take | Repeat


class Order:
    """What moves do to `num` examples, or batches.

    >>> Order(3, [Repeat(), Take(5)]).places(0, 2, 5)
    (array([0, 1, 1]), array([2, 0, 1]))
    """

    def __init__(self, num: int, moves: Sequence[Move]) -> None:
        self.num: int | None = num  # None: endless
        self.rounds = 1  # that an epoch takes of what is repeated
        self._moves: list[tuple[Move, int]] = []  # with the number before it
        for index, move in enumerate(moves):
            before = self.num
            if isinstance(move, Take):
                self.num = move.num if before is None else min(move.num, before)
            elif isinstance(move, Repeat):
                self.num = None
                taken = [later.num for later in moves[index:] if isinstance(later, Take)]
                self.rounds = -(-min(taken) // before) if taken and before is not None else 1
            if before is not None:
                self._moves.append((move, before))

    def places(self, epoch: int, start: int, stop: int) -> tuple[Indices, Indices]:
        """For the positions from `start` up to `stop` of an epoch: the base's own epochs, and indices."""
        epochs = np.full(stop - start, epoch)
        indices: Indices | None = None  # None: still one after another, from `start` on
        for move, num in reversed(self._moves):
            if isinstance(move, Repeat):
                positions = np.arange(start, stop) if indices is None else indices
                epochs, indices = epochs * self.rounds + positions // num, positions % num
            elif isinstance(move, Shuffle):
                if indices is None:
                    indices = order(move.seed, epoch, num).between(start, stop)
                else:
                    indices = _shuffled(move.seed, epochs, indices, num)
        return epochs, np.arange(start, stop) if indices is None else indices


def _shuffled(seed: int, epochs: Indices, positions: Indices, num: int) -> Indices:
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        there = epochs == epoch
        result[there] = order(seed, int(epoch), num).at(positions[there])
    return result
