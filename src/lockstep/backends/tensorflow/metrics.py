"""Metrics of a plain function, as sums over a shard."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lockstep.backends.tensorflow.losses import Weighed, double, ignored
from lockstep.core.metrics import Column, Metric, ratio
from lockstep.core.target_kind import Match, match
from lockstep.errors import ModelError

ROOM = 1024  # for a metric with sums of its own, such as a confusion matrix of 32 classes

_OF_FLAGS = ("BinaryCrossentropy", "BinaryFocalCrossentropy")  # Keras's, which need not be imported


def named(loss: Any) -> Mapping[str, Callable[[Any, Any], Any]]:
    """The metrics that go by a name; targets that the loss ignores do not count, and logits are told from odds."""
    left_out = ignored(loss)
    flags = type(loss).__name__ in _OF_FLAGS
    threshold = 0.5 if flags and not loss.get_config().get("from_logits") else 0.0

    def counted(hits: Any, targets: Any) -> Any:
        there = tf.ones_like(hits) if left_out is None else tf.not_equal(targets, tf.cast(left_out, targets.dtype))
        return tf.reduce_sum(double(tf.logical_and(hits, there))), tf.reduce_sum(double(there))

    def accuracy(outputs: Any, targets: Any) -> Any:
        found = match("accuracy", outputs.shape, targets.shape, flags=flags)
        if found is Match.FLAGS:
            hits = tf.equal(tf.reshape(outputs, targets.shape) > threshold, double(targets) > 0.5)
            return tf.reduce_sum(double(hits)), tf.size(hits)
        targets = tf.argmax(targets, -1) if found is Match.ODDS else targets
        return counted(tf.equal(tf.argmax(outputs, -1), tf.cast(targets, tf.int64)), targets)

    def top5(outputs: Any, targets: Any) -> Any:
        found = match("top5", outputs.shape, targets.shape)
        targets = tf.argmax(targets, -1) if found is Match.ODDS else targets
        best = tf.math.top_k(outputs, min(5, outputs.shape[-1])).indices
        return counted(tf.reduce_any(best == tf.cast(targets, tf.int32)[..., tf.newaxis], -1), targets)

    return {
        "accuracy": accuracy,
        "top5": top5,
        "mse": lambda outputs, targets: _errors(outputs, targets, tf.square),
        "mae": lambda outputs, targets: _errors(outputs, targets, tf.abs),
    }


def measure(metrics: Sequence[Metric], weighed: Weighed, examples: int) -> tuple[list[Any], list[Column]]:
    """The sums of every metric over one shard, and the columns they fill."""
    sums, columns = [], []
    for metric in metrics:
        if weighed.outputs is None or weighed.targets is None:
            raise ModelError(
                "Metrics compare outputs and targets, and this loss tells neither. "
                "Let an objective return its own: return loss, {'name': value}."
            )
        value = metric.sums(weighed.outputs, weighed.targets)
        own = _pair(metric.name, value, examples) if metric.result is ratio else _flat(value)
        sums.append(own)
        columns.append(Column(metric.name, int(own.shape[0]), metric.result))
    for name, value in sorted(weighed.values.items()):
        sums.append(_pair(name, value, examples))
        columns.append(Column(name, 2))
    return sums, columns


def _flat(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tf.stack([double(each) for each in value])
    return tf.reshape(double(value), (-1,))


def _pair(name: str, value: Any, examples: int) -> Any:
    """(sum, weight) out of a pair, one value per example, or the mean over the shard."""
    if isinstance(value, tuple) and len(value) == 2:
        return _flat(value)
    value = double(value)
    if not value.shape.rank:
        return _flat((value * examples, examples))
    if value.shape[0] != examples:
        raise ModelError(
            f"A metric gives one value per example, or (sum, weight). Got shape {tuple(value.shape)} from {name!r} "
            f"for a shard of {examples}. Return one of these."
        )
    return _flat((tf.reduce_sum(tf.reduce_mean(tf.reshape(value, (examples, -1)), 1)), examples))


def _errors(outputs: Any, targets: Any, of: Callable[[Any], Any]) -> Any:
    if outputs.shape != targets.shape:
        raise ModelError(
            "mse and mae compare outputs and targets of one shape. "
            f"Got {tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape one of them."
        )
    errors = of(double(outputs) - double(targets))
    return tf.reduce_sum(errors), tf.size(errors)
