"""Metrics by name, as (sum, weight) over a shard."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mxnet import gluon, nd

from lockstep.backends.mxnet import arrays
from lockstep.core.metrics import Column, Metric, ratio
from lockstep.core.target_kind import Match, match
from lockstep.errors import ModelError

Pair = tuple[Any, Any]


def named(loss: Any) -> Mapping[str, Callable[[Any, Any], Pair]]:
    """The metrics that go by a name; targets that the loss ignores do not count, and logits are told from odds."""
    ignored = getattr(loss, "ignore_label", None)
    axis = getattr(loss, "_axis", 1)
    flags = isinstance(loss, gluon.loss.SigmoidBinaryCrossEntropyLoss)
    threshold = 0.5 if flags and loss._from_sigmoid else 0.0

    def in_place(outputs: Any, targets: Any) -> Any:
        """The targets without an axis of their own for the one label in every row."""
        in_rows = targets.ndim == outputs.ndim > 1 and targets.shape[axis] == 1 and outputs.shape[axis] > 1
        return targets.squeeze(axis=axis) if in_rows and not flags else targets

    def accuracy(outputs: Any, targets: Any) -> Pair:
        outputs, targets = arrays.classic(outputs), in_place(outputs, _double(targets))
        found = match("accuracy", outputs.shape, targets.shape, axis=axis, flags=flags)
        if found is Match.FLAGS:
            hits = _double(outputs.reshape(targets.shape) > threshold) == (targets > 0.5)
            return arrays.total(hits), hits.size
        targets = _double(nd.argmax(targets, axis=axis)) if found is Match.ODDS else targets
        return _counted(_double(nd.argmax(outputs, axis=axis)) == targets, targets)

    def top5(outputs: Any, targets: Any) -> Pair:
        outputs, targets = arrays.classic(outputs), in_place(outputs, _double(targets))
        found = match("top5", outputs.shape, targets.shape, axis=axis)
        targets = _double(nd.argmax(targets, axis=axis)) if found is Match.ODDS else targets
        place = axis % outputs.ndim
        best = nd.topk(outputs, k=min(5, outputs.shape[place]), axis=place, dtype="float64")
        hits = nd.broadcast_equal(best, targets.expand_dims(place)).max(axis=place)
        return _counted(hits, targets)

    def mse(outputs: Any, targets: Any) -> Pair:
        errors = _errors(outputs, targets)
        return arrays.total(errors * errors), errors.size

    def mae(outputs: Any, targets: Any) -> Pair:
        errors = _errors(outputs, targets)
        return arrays.total(nd.abs(errors)), errors.size

    def _counted(hits: Any, targets: Any) -> Pair:
        if ignored is None:
            return arrays.total(hits), hits.size
        counted = targets != ignored
        return arrays.total(hits * counted), arrays.total(counted)

    return {"accuracy": accuracy, "top5": top5, "mse": mse, "mae": mae}


def measure(metric: Metric, outputs: Any, targets: Any, examples: int) -> tuple[list[Any], Column]:
    """The sums of a metric over one shard, and the column they fill."""
    value = metric.sums(outputs, targets)
    if metric.result is ratio:
        return pair(metric.name, value, examples), Column(metric.name, 2)
    if isinstance(value, tuple | list):
        sums = [_one(each) for each in value]
        return sums, Column(metric.name, len(sums), metric.result)
    if arrays.is_array(value):
        vector = _double(arrays.flat(value))
        return [vector], Column(metric.name, vector.size, metric.result)
    numbers = np.asarray(value, "float64").reshape(-1).tolist()
    return numbers, Column(metric.name, len(numbers), metric.result)


def pair(name: str, value: Any, examples: int) -> list[Any]:
    """(sum, weight) out of a pair, one value per example, or the mean over the shard."""
    if isinstance(value, tuple) and len(value) == 2:
        return [_one(value[0]), _one(value[1])]
    if not arrays.is_array(value):
        value = np.asarray(value, "float64")
    if value.size == 1:
        return [_one(value) * examples, examples]
    if value.shape[0] != examples:
        raise ModelError(
            f"A metric gives one value per example, or (sum, weight). Got shape {tuple(value.shape)} from {name!r} "
            f"for a shard of {examples}. Return one of these."
        )
    if arrays.is_array(value):
        each = _double(arrays.flat(value)).reshape((examples, -1)).mean(axis=1)
        return [arrays.total(each), examples]
    return [float(value.reshape(examples, -1).mean(1).sum()), examples]


def _one(value: Any) -> Any:
    """A number, or a vector of one in float64."""
    return arrays.total(value) if arrays.is_array(value) else float(value)


def _double(array: Any) -> Any:
    return arrays.classic(array).astype("float64", copy=False)


def _errors(outputs: Any, targets: Any) -> Any:
    if outputs.shape != targets.shape:
        raise ModelError(
            "mse and mae compare outputs and targets of one shape. "
            f"Got {tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape one of them."
        )
    return _double(outputs) - _double(targets)
