"""The metrics that are given by name: accuracy, top5, mse and mae, as (sum, weight) over a shard."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from lockstep.core.shard_sums import OwnPair
from lockstep.core.target_kind import TargetKind, find_target_kind
from lockstep.errors import ModelError

if TYPE_CHECKING:
    from lockstep.backends.array_ops import ArrayOps


@dataclass(frozen=True)
class LossTraits:
    """The properties of a loss that metrics need: ignored label, class axis, and how the loss reads binary targets."""

    ignored: int | None = None  # the label that does not count
    axis: int = -1  # of the classes
    binary: bool = False  # whether targets are taken element by element
    threshold: float = 0.0  # from which on an output for a binary target means yes: 0.5 of probabilities
    column: bool = False  # whether labels may keep the axis of the classes, of length 1


class NamedMetrics:
    """Computes the named metrics for one loss, on one framework's arrays.

    With `leaves_counts=True` the functions return an array of bools in place of its count, which is computed later,
    when the sums are read.
    """

    def __init__(self, ops: "ArrayOps", traits: LossTraits, leaves_counts: bool = False) -> None:
        self._ops = ops
        self._traits = traits
        self._leaves_counts = leaves_counts

    def functions(self) -> dict[str, Callable[[Any, Any], OwnPair]]:
        """Returns the function of every metric by its name."""
        return {"accuracy": self._accuracy, "top5": self._top5, "mse": self._mse, "mae": self._mae}

    def _accuracy(self, outputs: Any, targets: Any) -> OwnPair:
        ops, axis = self._ops, self._traits.axis
        targets, kind = self._read_targets("accuracy", outputs, targets)
        if kind is TargetKind.BINARY:
            found = ops.reshape(outputs, tuple(targets.shape)) > self._traits.threshold
            hits = ops.equal(found, ops.double(targets) > 0.5)
            return OwnPair(ops.count_true(hits), prod(hits.shape))
        return self._count(ops.equal(ops.argmax(outputs, axis), targets), targets)

    def _top5(self, outputs: Any, targets: Any) -> OwnPair:
        axis = self._traits.axis % len(outputs.shape)
        targets, _ = self._read_targets("top5", outputs, targets)
        return self._count(self._ops.has_in_top(outputs, targets, min(5, outputs.shape[axis]), axis), targets)

    def _mse(self, outputs: Any, targets: Any) -> OwnPair:
        errors = self._subtract(outputs, targets)
        return OwnPair(self._ops.total(errors * errors), prod(errors.shape))

    def _mae(self, outputs: Any, targets: Any) -> OwnPair:
        errors = self._subtract(outputs, targets)
        return OwnPair(self._ops.total(abs(errors)), prod(errors.shape))

    def _read_targets(self, metric: str, outputs: Any, targets: Any) -> tuple[Any, TargetKind]:
        """Returns the targets, as labels unless they are binary, and their kind."""
        traits, shape = self._traits, tuple(outputs.shape)
        if traits.column and not traits.binary and len(targets.shape) == len(shape) > 1:
            classes = traits.axis % len(shape)
            if targets.shape[classes] == 1 < shape[classes]:
                targets = self._ops.reshape(targets, shape[:classes] + shape[classes + 1 :])
        binary = traits.binary and metric == "accuracy"
        kind = find_target_kind(metric, shape, tuple(targets.shape), axis=traits.axis, binary=binary)
        if kind is TargetKind.PROBABILITIES:
            targets = self._ops.argmax(targets, traits.axis)
        return targets, kind

    def _count(self, hits: Any, targets: Any) -> OwnPair:
        """Returns the number of hits, and the number of targets that are not ignored."""
        ops, ignored = self._ops, self._traits.ignored
        if self._leaves_counts:
            counted = prod(hits.shape) if ignored is None else targets != ignored
            return OwnPair(hits if ignored is None or ignored < 0 else hits & counted, counted)
        if ignored is None:
            return OwnPair(ops.count_true(hits), prod(hits.shape))
        left_out = ops.equal(targets, ignored)
        if ignored >= 0:  # else it is no class, and is never hit
            hits = ops.where(left_out, False, hits)
        return OwnPair(ops.count_true(hits), prod(hits.shape) - ops.count_true(left_out))

    def _subtract(self, outputs: Any, targets: Any) -> Any:
        if tuple(outputs.shape) != tuple(targets.shape):
            raise ModelError(
                f"mse and mae need outputs and targets of the same shape. Got {tuple(outputs.shape)} and "
                f"{tuple(targets.shape)}. Reshape one of them."
            )
        return self._ops.double(outputs) - self._ops.double(targets)
