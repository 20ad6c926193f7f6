"""The sums of one shard: its loss and its metrics, under the same names in every shard.

The vectors `[loss, weight, divided, metric sums ...]` are added in tree order, on the host. All have one length, with
room for the most sums that the metrics may have; `divided` is 1 if the loss is a sum that is divided by the weight
after the tree, else 0. Where processes compute shards apart, a vector ends with two more numbers, a checksum of the
metrics' names and 1: their sums show whether all shards have the same metrics.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.metrics import FIRST_METRIC, LOSS, Column, Metric, Sums, ratio
from lockstep.core.objective import Objective
from lockstep.errors import ModelError, NonFiniteError

if TYPE_CHECKING:
    from lockstep.backends.array_ops import ArrayOps
    from lockstep.core.weighing import Term

CUSTOM_SUMS = 1024  # room for a metric with sums of its own, such as a confusion matrix of 32 classes
NUM_CHECKS = 2  # the numbers at the end of the vector: the names' checksum, and 1


class Summand(NamedTuple):
    """A part of the vector: a number or an array of the framework, and a plain number by which it is multiplied."""

    value: Any
    times: float = 1.0


class OwnSummand(Summand):
    """A summand whose array no other code refers to, so that the array need not be copied.

    An array of bools stands for the number of its true elements, which is counted when the sums are read.
    """

    __slots__ = ()


class OwnPair(NamedTuple):
    """What a named metric returns: a sum and its weight, each as in `OwnSummand`."""

    value: Any
    weight: Any


class ShardSums:
    """The vectors of sums of this process's shards in one step, which the framework may still be computing.

    `read` waits for them, and raises if a loss is not finite. `check` gets the sum over the
    shards of all processes, and raises if it shows that the shards' metrics differ.
    """

    def __init__(self, read: Callable[[], Mapping[int, Sums]], check: Callable[[Sums], None] | None = None) -> None:
        self._read = read
        self._check = check
        self._vectors: Mapping[int, Sums] | None = None

    def read(self) -> Mapping[int, Sums]:
        """Returns each shard's vector; reads them from the framework the first time."""
        if self._vectors is None:
            self._vectors = self._read()
        return self._vectors

    def check(self, sums: Sums) -> None:
        """Raises if the sum over all shards shows that the metrics differ between processes."""
        if self._check is not None:
            self._check(sums)


def add_shard_sums(shard_sums: ShardSums, vectors: Mapping[int, Sums], num_shards: int) -> Sums:
    """Adds the vectors of all shards in tree order and checks their sum."""
    found = [vectors[shard] for shard in range(num_shards) if shard in vectors]  # those without examples are the last
    total = add_rows(np.array(found)) if len(found) > 1 else found[0]
    shard_sums.check(total)
    return total


def add_rows(rows: NDArray[np.float64]) -> Sums:
    """Adds rows in tree order: neighbours, then neighbouring sums of two, and so on.

    >>> add_rows(np.array([[1.0], [2.0], [3.0]]))
    array([6.])
    """
    while len(rows) > 1:
        sums = rows[:-1:2] + rows[1::2]
        rows = np.concatenate([sums, rows[-1:]]) if len(rows) % 2 else sums
    total: Sums = rows[0]
    return total


def find_room(metrics: Sequence[Metric], loss: Any) -> int:
    """Returns the largest number of sums that the metrics of a step may have, including those of an objective."""
    known = sum(2 if metric.result is ratio else CUSTOM_SUMS for metric in metrics)
    return known + CUSTOM_SUMS * isinstance(loss, Objective)


def list_loss_parts(term: "Term") -> list[Summand]:
    """Returns the summands that the vector begins with: loss, weight, divided."""
    kind = OwnSummand if term.is_own else Summand
    return [kind(term.loss, term.times), kind(term.weight), Summand(term.divided)]


def measure(
    ops: "ArrayOps", metrics: Sequence[Metric], term: "Term", examples: int
) -> tuple[list[Summand], list[Column]]:
    """Returns the summands of one shard's vector of sums (the loss's, then each metric's), and their columns."""
    parts = list_loss_parts(term)
    columns = []
    for metric in metrics:
        if term.outputs is None or term.targets is None:
            raise ModelError(
                f"The metric {metric.name!r} compares outputs with targets, but this loss gives Lockstep neither. "
                "Use an objective that also returns the metric: return loss, {'name': value}."
            )
        value = metric.sums(term.outputs, term.targets)
        if isinstance(value, OwnPair):
            parts += map(OwnSummand, value)
            columns.append(_find_ratio_column(metric.name))
            continue
        if metric.result is ratio:
            own, width = _pair(ops, metric.name, value, examples), 2
        elif isinstance(value, tuple | list):
            own, width = [_one_number(ops, metric.name, each) for each in value], len(value)
        else:
            array = ops.as_array(value)
            own, width = [Summand(array)], math.prod(array.shape)
        parts += own
        columns.append(Column(metric.name, width, metric.result))
    for name, value in sorted(term.values.items()):
        parts += _pair(ops, name, value, examples)
        columns.append(Column(name, 2))
    return parts, columns


@lru_cache
def _find_ratio_column(name: str) -> Column:
    """Returns the column of a named metric; the same object for every shard, so that comparing columns is fast."""
    return Column(name, 2)


def _pair(ops: "ArrayOps", name: str, value: Any, examples: int) -> list[Summand]:
    """Returns the summands (sum, weight) of a metric that gives such a pair, one value per example, or a mean."""
    if isinstance(value, tuple) and len(value) == 2:
        return [_one_number(ops, name, each) for each in value]
    value = ops.as_array(value)
    if not ops.shape(value):
        return [Summand(value, examples), Summand(examples)]
    if value.shape[0] != examples:
        raise ModelError(
            "A metric must return one value per example, or (sum, weight). "
            f"Got shape {tuple(value.shape)} from {name!r} for a shard of {examples}. Return one of these."
        )
    return [Summand(ops.total(ops.average_rows(ops.double(value), examples))), Summand(examples)]


def _one_number(ops: "ArrayOps", name: str, value: Any) -> Summand:
    """Returns the summand of an entry of a pair or list; raises unless it is one number, which takes one place."""
    shape = ops.shape(value) if ops.is_array(value) else np.shape(value)
    if math.prod(shape) != 1:
        raise ModelError(
            f"A metric that returns a pair or a list must return one number for each entry. {name!r} returned an entry "
            f"of shape {tuple(shape)}. Add up the entry's elements, or return one array with one value per example."
        )
    return Summand(value)


class ShardNames:
    """Checks that all shards of one command have the same metrics."""

    def __init__(self) -> None:
        self.columns: Sequence[Column] = ()
        self._names: list[str] | None = None  # of the shards of this command

    def begin(self) -> None:
        """Forgets the metric names of the previous command, because the next one may have other metrics."""
        self._names = None

    def add(self, columns: Sequence[Column]) -> None:
        """Records one shard's columns; raises if another shard of the command has different columns."""
        if self._names is not None and columns == self.columns:
            return
        names = [column.name for column in columns]
        if self._names is not None and names != self._names:
            raise _explain(names, str(self._names))
        self._names, self.columns = names, columns

    @property
    def begun(self) -> bool:
        """Whether the metrics of a shard of this command were recorded."""
        return self._names is not None

    def checks(self, *more: str) -> list[float]:
        """Returns the last two numbers of a shard's vector: a checksum of the metrics' names and of `more`, and 1."""
        return [_compute_checksum((*(self._names or ()), *more)), 1.0]

    def check(self, sums: Sums) -> None:
        """Raises if the metrics of a shard of another process differ."""
        if self._names is not None and sums[-2] != self.checks()[0] * sums[-1]:
            raise _explain(self._names, "others")


@lru_cache
def _compute_checksum(names: tuple[str, ...]) -> float:
    return float(zlib.crc32("\n".join(names).encode()))


def _explain(names: Sequence[str], others: str) -> ModelError:
    return ModelError(
        f"An objective must return the same metrics for every shard. Got {list(names)} in one shard and {others} in "
        "another. Return every name every time."
    )


def check_room(num_sums: int, room: int) -> None:
    """Raises if the metrics of a step have more sums than the layout has room for."""
    if num_sums > room:
        raise ModelError(
            f"The metrics of a step can have at most {room} sums. Got {num_sums}. Return fewer sums, or divide them "
            "among several lockstep.Metric."
        )


def check_loss(sums: Sums | Sequence[float], step: int, shard: int) -> None:
    """Raises if the loss of a shard is not finite."""
    if not math.isfinite(sums[LOSS]):
        raise NonFiniteError.at(step, shard, float(sums[LOSS]))


def pad(sums: Sums, size: int, end: Sequence[float] = ()) -> Sums:
    """Returns a vector of the layout's length: the sums, zeros, and `end`.

    >>> pad(np.array([1.0, 2.0, 3.0]), 6, [7.0])
    array([1., 2., 3., 0., 0., 7.])
    """
    room = size - len(end)
    check_room(len(sums) - FIRST_METRIC, room - FIRST_METRIC)
    result = np.zeros(size)
    result[: len(sums)] = sums
    result[room:] = end
    return result
