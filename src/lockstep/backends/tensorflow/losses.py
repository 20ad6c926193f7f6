"""Losses: what a shard's loss weighs, so that the shards add up to the batch's own loss.

A mean over the shard's examples is multiplied by (its examples / the batch's) before
the backward pass; the shards then simply add. A loss that divides by something else
(targets that are not ignored, example weights) is summed instead and divided once after
the tree. With one shard neither happens: the loss is the user's own, to the bit.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lockstep.backends.loss_denominator import Counted, is_of_keras
from lockstep.backends.tensorflow.flat_vectors import accumulated
from lockstep.backends.tensorflow.program import Share, Term
from lockstep.core.batches import describe
from lockstep.core.metrics import Column
from lockstep.core.objective import Objective, Sum, read_sum
from lockstep.core.weights import explain_missing_input, split_batch
from lockstep.errors import BatchError, ModelError

Call = Callable[[Any], Any]
Compare = Callable[[Any, Any], Any]


class Weighed(NamedTuple):
    """A shard's loss: what is differentiated, the sum, its weight, and whether it is still to be divided."""

    root: Any
    loss: Any
    weight: Any
    divided: Any
    outputs: Any = None
    targets: Any = None
    values: Mapping[str, Any] = {}  # an objective's own metrics
    there: Any = True  # whether this shard weighs anything; one that does not has no gradient
    share: Any = None  # by what the gradient is still to be multiplied

    def term(self, kept: Sequence[Any], sums: Sequence[Any], columns: Sequence[Column]) -> Term:
        """The shard's term, with its running statistics and the sums of its metrics."""
        return Term(self.root, self.loss, self.weight, self.divided, kept, sums, columns, self.there, self.share)


def of(loss: Any) -> Callable[[Call, Any, Share], Weighed]:
    """The function (model, shard's batch, share) -> Weighed for whatever the user gave as loss."""
    if loss is None:
        return _models_own
    if isinstance(loss, Objective):
        return functools.partial(_objective, loss)
    return functools.partial(_compared, _criterion(loss))


def ignored(loss: Any) -> int | None:
    """The target that the loss leaves out, if it has one."""
    found: int | None = getattr(loss, "ignore_class", None)
    return found


def criterion_of(loss: Any) -> Compare | None:
    """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
    said = isinstance(loss, Objective | str) or is_of_keras(loss) or getattr(loss, "reduction", None) == "sum"
    if loss is None or said:
        return None
    found = _criterion(loss)
    return (lambda outputs, targets: found(targets, outputs)) if isinstance(found, tf.keras.losses.Loss) else found


def double(value: Any) -> Any:
    """A number in float64, for the sums."""
    return tf.cast(value, tf.float64)


def mean(value: Any, share: Share, **rest: Any) -> Weighed:
    """A mean over the shard's examples.

    A loss in a shorter type than leaves are added in would round its share, so there the gradient is multiplied by it.
    """
    loss = double(value) * share.examples
    if share.alone:
        return Weighed(value, loss, share.examples, 0.0, **rest)
    if accumulated(value) != value.dtype:
        return Weighed(value, loss, share.examples, 0.0, share=share.part, **rest)
    return Weighed(value * tf.cast(share.part, value.dtype), loss, share.examples, 0.0, **rest)


def pair(value: Any, weight: Any, share: Share, there: Any = None, **rest: Any) -> Weighed:
    """A sum over the shard and what it is to be divided by; a shard that is not `there` is for the host to see.

    Weights of both signs may cancel in a shard that has a gradient all the same; a batch in which they do is refused.
    A sum whose weight is 0 counts too, unless it is 0 / 0 as in a shard without anything to count.
    """
    weight = double(weight)
    nonzero = tf.not_equal(weight, 0)
    if share.alone:
        nothing = tf.cast(tf.equal(weight, 0), tf.float64)
        root = value / tf.cast(weight + nothing, value.dtype)
        return Weighed(root, double(value), weight, nothing, there=nonzero, **rest)
    if there is None:
        there = nonzero | (tf.math.is_finite(value) & tf.not_equal(value, 0))
    return Weighed(value, double(value), weight, 1.0, there=there, **rest)


def total(loss: Sum, share: Share, **rest: Any) -> Weighed:
    """A sum, which is divided only if it has a count."""
    if loss.count is None:
        return Weighed(loss.total, double(loss.total), 0.0, 0.0, **rest)
    return pair(loss.total, loss.count, share, **rest)


def own_mean(value: Any, counted: Any, share: Share, **rest: Any) -> Weighed:
    """A mean that the loss itself has divided."""
    weight = double(counted.weight)
    nonzero = tf.not_equal(weight, 0)
    if share.alone:
        nothing = tf.cast(tf.equal(weight, 0), tf.float64)
        return Weighed(value, double(value) * weight, weight, nothing, there=nonzero, **rest)
    total = value * tf.cast(weight, value.dtype)
    if counted.total is not None:
        total = tf.where(nonzero, total, tf.cast(counted.total, value.dtype))
    return pair(total, weight, share, counted.there, **rest)


def _models_own(model: Call, batch: Any, share: Share) -> Weighed:
    """The loss that the model's output carries."""
    outputs = model(batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise ModelError(
            "Without a loss the model's output carries one as `.loss`. "
            f"Got {describe(outputs)}. Give wrap a loss, or return an output with `.loss`."
        )
    if loss.shape.rank and loss.shape[0] != share.examples:
        raise ModelError(
            f"The loss of a model's output is one number, or one per example. Got shape {tuple(loss.shape)} for a "
            f"shard of {share.examples}. Return its mean."
        )
    return mean(tf.reduce_mean(loss) if loss.shape.rank else loss, share)


def _objective(objective: Objective, model: Call, batch: Any, share: Share) -> Weighed:
    """What the user's own function says: a mean, a sum, or one of them with metrics."""
    loss, values = objective.compute(model, batch)
    if isinstance(loss, Sum):
        return total(loss, share, values=values)
    if not tf.is_tensor(loss) or (loss.shape.rank and loss.shape[0] != share.examples):
        raise ModelError(
            "An objective returns the shard's mean loss as a tensor, one loss per example, "
            "lockstep.Sum(total, count), or (one of these, {name: value}). "
            f"Got {describe(loss)} for a shard of {share.examples}."
        )
    return mean(tf.reduce_mean(loss) if loss.shape.rank else loss, share, values=values)


def _compared(criterion: Any, model: Call, batch: Any, share: Share) -> Weighed:
    """A loss of (outputs, targets), with example weights where the batch has them."""
    inputs, targets, weights = split_batch(batch, "tf.cast(weights, tf.float32)")
    with explain_missing_input(batch):
        outputs = model(inputs)
    rest = {"outputs": outputs, "targets": targets}
    if isinstance(criterion, tf.keras.losses.Loss):
        return _of_keras(criterion, outputs, targets, weights, share, rest)
    value = read_sum(criterion(outputs, targets))
    if isinstance(value, Sum) and weights is None:
        return total(value, share, **rest)
    if not tf.is_tensor(value) or (value.shape.rank and value.shape[0] != share.examples):
        raise ModelError(
            "A loss gives one number, one per example, or lockstep.Sum(total, count). "
            f"Got {describe(value)} for a shard of {share.examples}."
        )
    if weights is None and share.summed:
        return total(Sum(value), share, **rest)
    if weights is None:
        return mean(tf.reduce_mean(value) if value.shape.rank else value, share, **rest)
    if not value.shape.rank:
        raise ModelError(
            f"Example weights need a loss that gives one value per example. Got {describe(value)} for a shard of "
            f"{share.examples}. Return one value per example, or write an objective that returns "
            "lockstep.Sum(total, count)."
        )
    flat = tf.reshape(weights, (-1,))
    if flat.shape[0] != share.examples:
        raise BatchError(
            f"There is one weight per example. Got weights of shape {tuple(weights.shape)} for a shard of "
            f"{share.examples}. Give one number for each example."
        )
    each = tf.reduce_mean(tf.reshape(value, (share.examples, -1)), axis=1)
    weighted, weight = tf.reduce_sum(each * tf.cast(flat, each.dtype)), tf.reduce_sum(double(flat))
    return pair(weighted, weight, share, tf.reduce_any(flat != 0), **rest)


def _of_keras(criterion: Any, outputs: Any, targets: Any, weights: Any, share: Share, rest: Any) -> Weighed:
    """A Keras loss with Keras's own meaning of reductions, masks and weights."""
    value = criterion(targets, outputs, sample_weight=weights)
    if criterion.reduction == "sum" or (share.summed and weights is None):
        return Weighed(value, double(value), 0.0, 0.0, **rest)
    counted = _counted(criterion, outputs, targets, weights)
    if counted is None:
        return mean(tf.reduce_mean(value) if value.shape.rank else value, share, **rest)
    return own_mean(value, counted, share, **rest)


def _counted(criterion: Any, outputs: Any, targets: Any, weights: Any) -> Counted | None:
    """By what the loss's mean divides, where that is not the number of its values."""
    values = criterion.call(targets, tf.cast(outputs, criterion.dtype))
    mask = getattr(values, "_keras_mask", None)
    if criterion.reduction != "mean_with_sample_weight" or weights is None:
        return None if mask is None else Counted(tf.reduce_sum(double(mask)), None, None)
    counted = _spread(weights, values)
    counted = counted if mask is None else tf.where(tf.cast(mask, tf.bool), counted, 0)
    total = tf.reduce_sum(values * tf.cast(counted, values.dtype))
    return Counted(tf.reduce_sum(counted), tf.reduce_any(counted != 0), total)


def _spread(weights: Any, values: Any) -> Any:
    """One weight for every value."""
    shape = [*weights.shape, *[1] * (values.shape.rank - weights.shape.rank)]
    return tf.broadcast_to(tf.reshape(double(weights), shape), values.shape)


def _criterion(loss: Any) -> Any:
    """A Keras loss, or a function of (outputs, targets)."""
    if isinstance(loss, str):
        return _named(loss)
    if isinstance(loss, tf.keras.losses.Loss):
        return loss
    if not callable(loss):
        raise ModelError(
            f"A loss is a Keras loss, a function of (outputs, targets) or a lockstep.objective. Got {loss!r}."
        )
    if getattr(loss, "__module__", "").startswith("keras."):
        return lambda outputs, targets: loss(targets, outputs)
    return loss


def _named(name: str) -> Any:
    if name == "cross_entropy":
        return lambda outputs, targets: tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    try:
        function = tf.keras.losses.get(name)
    except ValueError:
        raise ModelError(
            f"A loss's name is 'cross_entropy' (of logits and class indices) or one of Keras's. Got {name!r}. "
            "Use one of these, a Keras loss, a function of (outputs, targets) or a lockstep.objective."
        ) from None
    return lambda outputs, targets: function(targets, outputs)
