"""The types of the values that Lockstep and a framework's backend pass to each other: work, partial sums and state.

No framework appears here, so `checkpoint`, `exchange` and `processes` can use these types without knowing a backend.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# The gradients and averaged arrays of some shards, summed: one flat vector for each accumulation type,
# `{"float32": vector, ...}`, arranged by a `Layout`. The vectors are the framework's own arrays, so the framework adds
# them. The partial sum of a single shard is called a leaf.
PartialSum = Mapping[str, Any]


class Phases(Enum):
    """The phases of a step that are to be made: all of them, or a part for `trainer.gradients` and `trainer.apply`."""

    ALL = 0
    GRADIENT = 1  # those before the update
    UPDATE = 2  # the update, with a gradient that is given in the place of the first shard


class GivenGradient(NamedTuple):
    """The gradient for an update, summed over all shards: numpy vectors by type, and the batch's sums."""

    vectors: Mapping[str, NDArray[Any]]
    sums: NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """The part of one batch that this process computes.

    `pieces` has, for each replica of the process, the replica's shards that have examples. `num_examples` is the number
    of examples in the whole batch. `first` returns the first shard of the batch, even if another process computes it,
    because a model that creates its parameters at the first batch creates them from this shard. No code of the script
    runs between two steps of the same `quiet_period`, so nothing can have been changed there.
    """

    pieces: Mapping[int, Mapping[int, Any]]
    num_examples: int
    num_shards: int
    threads: int
    seed: int
    step: int
    first: Callable[[], Any] | None = None
    summed: bool = False  # whether a loss of (outputs, targets) whose reduction was found out by calling it is a sum
    phases: Phases = Phases.ALL
    quiet_period: int | None = None

    @property
    def num_filled(self) -> int:
        """The number of shards of the whole batch that are not empty; the empty shards are the last."""
        return 1 if self.phases is Phases.UPDATE else min(self.num_examples, self.num_shards)

    def count(self, shard: int) -> int:
        """Returns the number of examples in a shard."""
        size, extra = divmod(self.num_examples, self.num_shards)
        return size + (shard < extra)

    @property
    def shards(self) -> dict[int, Any]:
        """The shards of all replicas of this process, by shard number."""
        return {shard: piece for pieces in self.pieces.values() for shard, piece in pieces.items()}


class Array(NamedTuple):
    """One array of the state and the name of its dtype, which is `python` for a plain number of the optimizer."""

    data: NDArray[Any]
    dtype: str


State = dict[str, Array]  # the arrays of the model, the optimizer and the rest of the state, by name


class LazyState(Mapping[str, Array]):
    """A state whose arrays are copied each time they are read, so that they are not all in memory twice.

    `sources` are arrays as the framework has them, which `to_array` copies; an `Array` is returned unchanged.
    `dict(lazy)` is the whole copy.

    >>> weights = np.zeros(2)
    >>> lazy = LazyState({"model.w": weights}, to_array)
    >>> weights[0] = 1
    >>> list(lazy), lazy["model.w"].data
    (['model.w'], array([1., 0.]))
    """

    def __init__(self, sources: Mapping[str, Any], to_array: Callable[[Any], Array]) -> None:
        self._sources = sources
        self._to_array = to_array

    def __getitem__(self, name: str) -> Array:
        source = self._sources[name]
        return source if isinstance(source, Array) else self._to_array(source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def to_array(data: NDArray[Any]) -> Array:
    """Copies a numpy array."""
    return Array(np.ascontiguousarray(data.copy()), str(data.dtype))
