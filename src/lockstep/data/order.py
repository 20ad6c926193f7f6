"""Computes the order of an epoch: which example of the input is at which position.

`.shuffle`, `.take` and `.repeat` reorder examples without reading them. This is arithmetic on positions, so any part of
any epoch can be computed directly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.permutation import order

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Shuffle:
    """The `.shuffle` step of a pipeline: puts the examples into a different order in every epoch."""

    seed: int


@dataclass(frozen=True)
class Take:
    """The `.take` step of a pipeline: takes the first `num` examples of an epoch."""

    num: int


@dataclass(frozen=True)
class Repeat:
    """The `.repeat` step of a pipeline: appends all following epochs, so that the epoch is infinite."""


Move = Shuffle | Take | Repeat


class Order:
    """The order into which several moves put `num` examples or batches.

    >>> Order(3, [Repeat(), Take(5)]).locate(0, 2, 5)
    (array([0, 1, 1]), array([2, 0, 1]))
    """

    def __init__(self, num: int, moves: Sequence[Move]) -> None:
        self.num: int | None = num  # None if the order is infinite
        self.rounds = 1  # how many rounds of the repeated examples an epoch has
        self._moves: list[tuple[Move, int]] = []  # each move with the number of examples before it
        for index, move in enumerate(moves):
            before = self.num
            if isinstance(move, Take):
                self.num = move.num if before is None else min(move.num, before)
            elif isinstance(move, Repeat):
                self.num = None
                limits = [later.num for later in moves[index:] if isinstance(later, Take)]
                self.rounds = -(-min(limits) // before) if limits and before is not None else 1
            if before is not None:
                self._moves.append((move, before))

    def locate(self, epoch: int, start: int, stop: int) -> tuple[Indices, Indices]:
        """Returns the epochs and the input's indices of the examples at positions `start` to `stop` of an epoch."""
        epochs = np.full(stop - start, epoch)
        indices: Indices | None = None  # None stands for the range from `start` to `stop`
        for move, num in reversed(self._moves):
            if isinstance(move, Repeat):
                positions = np.arange(start, stop) if indices is None else indices
                epochs, indices = epochs * self.rounds + positions // num, positions % num
            elif isinstance(move, Shuffle):
                if indices is None:
                    indices = order(move.seed, epoch, num).between(start, stop)
                else:
                    indices = _shuffle(move.seed, epochs, indices, num)
        return epochs, np.arange(start, stop) if indices is None else indices


def _shuffle(seed: int, epochs: Indices, positions: Indices, num: int) -> Indices:
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        result[is_in_epoch] = order(seed, int(epoch), num).at(positions[is_in_epoch])
    return result
