"""The sums of one shard: its loss and its metrics, under the same names in every shard.

The vector `[loss, weight, divided, metric sums ...]` goes through the tree. Its layout
has room for the largest sums that the metrics may have, and ends with a checksum of the
metrics' names and 1, so that processes notice if their shards differ.
"""

import zlib
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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


def find_room(metrics: Sequence[Metric], loss: Any) -> int:
    """The most sums that the metrics of a step may have, those of an objective's own among them."""
    known = sum(2 if metric.result is ratio else CUSTOM_SUMS for metric in metrics)
    return known + CUSTOM_SUMS * isinstance(loss, Objective)


def list_loss_parts(term: "Term") -> list[Summand]:
    """[loss, weight, divided]: what the vector begins with."""
    return [Summand(term.loss, term.times), Summand(term.weight), Summand(term.divided)]


def measure(
    ops: "ArrayOps", metrics: Sequence[Metric], term: "Term", examples: int
) -> tuple[list[Summand], list[Column]]:
    """The parts of one shard's vector, and the columns of its metrics."""
    parts = list_loss_parts(term)
    columns = []
    for metric in metrics:
        if term.outputs is None or term.targets is None:
            raise ModelError(
                "Metrics compare outputs and targets, and this loss has neither. "
                "Let an objective return its own: return loss, {'name': value}."
            )
        value = metric.sums(term.outputs, term.targets)
        if metric.result is ratio:
            own, width = _pair(ops, metric.name, value, examples), 2
        elif isinstance(value, tuple | list):
            own, width = [_one_number(ops, metric.name, each) for each in value], len(value)
        else:
            array = ops.as_array(value)
            own, width = [Summand(array)], prod(array.shape)
        parts += own
        columns.append(Column(metric.name, width, metric.result))
    for name, value in sorted(term.values.items()):
        parts += _pair(ops, name, value, examples)
        columns.append(Column(name, 2))
    return parts, columns


def _pair(ops: "ArrayOps", name: str, value: Any, examples: int) -> list[Summand]:
    """(sum, weight) out of such a pair, one value per example, or the mean over the shard."""
    if isinstance(value, tuple) and len(value) == 2:
        return [_one_number(ops, name, each) for each in value]
    value = ops.as_array(value)
    if not ops.shape(value):
        return [Summand(value, examples), Summand(examples)]
    if value.shape[0] != examples:
        raise ModelError(
            f"A metric gives one value per example, or (sum, weight). Got shape {tuple(value.shape)} from {name!r} "
            f"for a shard of {examples}. Return one of these."
        )
    return [Summand(ops.total(ops.average_rows(ops.double(value), examples))), Summand(examples)]


def _one_number(ops: "ArrayOps", name: str, value: Any) -> Summand:
    """The summand of an entry of a pair or list; a vector there would move all later metrics in the vector of sums."""
    shape = ops.shape(value) if ops.is_array(value) else np.shape(value)
    if prod(shape) != 1:
        raise ModelError(
            f"The entries of a metric's pair or list are one number each. Got shape {tuple(shape)} from {name!r}. Add "
            "its elements up, or return one value per example without a pair."
        )
    return Summand(value)


class ShardNames:
    """Checks that all shards of one command have the same metrics."""

    def __init__(self) -> None:
        self.columns: Sequence[Column] = ()
        self._names: list[str] | None = None  # of the shards of this command

    def begin(self) -> None:
        """A new command may have other metrics."""
        self._names = None

    def add(self, columns: Sequence[Column]) -> None:
        """Take one shard's columns; raise if another shard has others."""
        names = [column.name for column in columns]
        if self._names is not None and names != self._names:
            raise _explain(names, str(self._names))
        self._names, self.columns = names, columns

    @property
    def begun(self) -> bool:
        """Whether a shard of this command has named its metrics."""
        return self._names is not None

    def checks(self, *more: str) -> list[float]:
        """What a shard's vector ends with: a checksum of the names, and of what else must be the same, and 1."""
        return [float(zlib.crc32("\n".join([*(self._names or ()), *more]).encode())), 1.0]

    def check(self, sums: Sums) -> None:
        """Raise if a shard of another process has other metrics."""
        if self._names is not None and sums[-2] != self.checks()[0] * sums[-1]:
            raise _explain(self._names, "others")


def _explain(names: Sequence[str], others: str) -> ModelError:
    return ModelError(
        f"An objective gives the same metrics for every shard. Got {list(names)} in one and {others} in another. "
        "Return every name every time."
    )


def check_room(num_sums: int, room: int) -> None:
    """Raise if the metrics of a step have more sums than the layout has room for."""
    if num_sums > room:
        raise ModelError(
            f"The metrics of a step give at most {room} sums. Got {num_sums}. "
            "Give fewer, or more than one lockstep.Metric."
        )


def check_loss(sums: Sums, step: int, shard: int) -> None:
    """Raise if the loss of a shard is not finite."""
    if not np.isfinite(sums[LOSS]):
        raise NonFiniteError.at(step, shard, float(sums[LOSS]))


def pad(sums: Sums, size: int, end: Sequence[float] = ()) -> Sums:
    """A vector as the layout has it: the sums, zeros, and `end`.

    >>> pad(np.array([1.0, 2.0, 3.0]), 6, [7.0])
    array([1., 2., 3., 0., 0., 7.])
    """
    room = size - len(end)
    check_room(len(sums) - FIRST_METRIC, room - FIRST_METRIC)
    result = np.zeros(size)
    result[: len(sums)] = sums
    result[room:] = end
    return result
