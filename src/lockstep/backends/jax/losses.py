"""Losses: what a shard's loss weighs, so that the shards add up to the batch's own loss.

A mean over the shard's examples is multiplied by (its examples / the batch's)
before the backward pass; the shards then simply add. A loss that divides by
something else (targets that are not ignored, class weights, example weights) is
summed instead and divided once after the tree. With one shard neither happens:
the loss is the user's own.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.backends.jax import vector_fields
from lockstep.backends.jax.builtin_losses import CrossEntropy, SquaredError
from lockstep.backends.jax.functional_model import spread
from lockstep.core.batches import describe
from lockstep.core.objective import Objective, Sum, read_sum
from lockstep.core.weights import explain_missing_input, split_batch
from lockstep.errors import BatchError, ModelError

_ONE_PER_EXAMPLE = ("optax.losses._classification", "optax.losses._regression")  # what their functions give
NAMED: dict[str, Any] = {"cross_entropy": CrossEntropy(), "mse": SquaredError()}


class Share(NamedTuple):
    """A shard's part of the batch: its examples, what they are of the batch's, and whether it is all there is."""

    examples: int
    fraction: Any
    alone: bool
    summed: bool = False  # whether a loss that does not say so itself is a sum


@dataclass(frozen=True)
class Term:
    """The loss of one shard: where the backward pass starts, and what the sums get.

    `scale` is a plain number by which the host multiplies the loss.
    """

    root: Any
    loss: Any
    weight: Any
    divided: Any = 0.0
    scale: float = 1.0
    outputs: Any = None
    targets: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)  # an objective's own metrics
    there: Any = True  # whether this shard weighs anything; one that does not has no gradient
    share: Any = None  # by what the gradient is still to be multiplied
    labels: tuple[int, int | None] | None = None  # of targets that are labels: the classes, and the label left out


def of(loss: Any) -> Callable[[Any, Any, Share], Term]:
    """The function (bound model, shard's batch, share) -> Term for whatever the user gave as loss."""
    if loss is None:
        return _models_own
    if isinstance(loss, Objective):
        return functools.partial(_objective, loss)
    criterion = resolve(loss)
    if not callable(criterion) and not isinstance(criterion, CrossEntropy | SquaredError):
        raise ModelError(
            f"A loss is one of {', '.join(map(repr, NAMED))}, a function of (outputs, targets) such as optax's, or a "
            f"lockstep.objective. Got {loss!r}."
        )
    return functools.partial(_compared, criterion)


def resolve(loss: Any) -> Any:
    """The loss that a name stands for; anything else as it is."""
    return NAMED.get(loss, loss) if isinstance(loss, str) else loss


def criterion_of(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
    criterion = resolve(loss)
    own = criterion.func if isinstance(criterion, functools.partial) else criterion
    said = (getattr(own, "__module__", None) or "") in _ONE_PER_EXAMPLE
    known = loss is None or isinstance(loss, Objective) or isinstance(criterion, CrossEntropy | SquaredError)
    return None if known or said else criterion


def mean(value: Any, share: Share, **rest: Any) -> Term:
    """A mean over the shard's examples.

    A loss in a shorter type than leaves are added in would round its share, so there the gradient is multiplied by it.
    """
    value = jnp.mean(value) if jnp.ndim(value) else value
    if share.alone:
        return Term(value, value, share.examples, scale=share.examples, **rest)
    if vector_fields.accumulated(value.dtype) != value.dtype:
        return Term(value, value, share.examples, scale=share.examples, share=share.fraction, **rest)
    root = value * jnp.asarray(share.fraction, value.dtype)
    return Term(root, value, share.examples, scale=share.examples, **rest)


def _pair(value: Any, weight: Any, share: Share, counted: Any = None, **rest: Any) -> Term:
    """A sum over the shard and what it is to be divided by; `counted` are the weights that add up to it, where known.

    Weights of both signs may cancel in a shard that has a gradient all the same; a batch in which they do is refused.
    A sum whose weight is 0 counts too, unless it is 0 / 0 as in a shard without anything to count.
    """
    weight = jnp.asarray(weight)
    there = weight != 0
    if not share.alone:
        there |= jnp.isfinite(value) & (value != 0) if counted is None else jnp.any(counted != 0)
    loss = jnp.where(there, value, 0)
    if not share.alone:
        return Term(value, loss, weight, 1.0, there=there, **rest)
    divisor = jnp.where(there, weight, 1).astype(jnp.result_type(value))
    return Term(value / divisor, loss, weight, jnp.where(there, 0.0, 1.0), there=there, **rest)


def _sum(loss: Sum, share: Share, **rest: Any) -> Term:
    """A sum, which is divided only if it has a count."""
    if loss.count is None:
        return Term(loss.total, loss.total, 0.0, **rest)
    return _pair(*loss, share, **rest)


def call(model: Any, inputs: Any, examples: int) -> Any:
    """The model's outputs for a shard, one row per example where they are one array."""
    arguments, named = spread(inputs)
    outputs = model(*arguments, **named)
    if isinstance(outputs, jax.Array) and (not outputs.ndim or len(outputs) != examples):
        raise ModelError(
            f"A model's outputs have one row per example on axis 0. Got shape {tuple(outputs.shape)} for a shard of "
            f"{examples}. Return such outputs."
        )
    return outputs


def _models_own(model: Any, batch: Any, share: Share) -> Term:
    """The loss that the model's output carries."""
    arguments, named = spread(batch)
    outputs = model(*arguments, **named)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, jax.Array):
        raise ModelError(
            "Without a loss the model's output carries one as `.loss`. "
            f"Got {describe(outputs)}. Give wrap a loss, or return an output with `.loss`."
        )
    if loss.ndim and len(loss) != share.examples:
        raise ModelError(
            f"The loss of a model's output is one number, or one per example. Got shape {tuple(loss.shape)} for a "
            f"shard of {share.examples}. Return its mean."
        )
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    targets = batch.get("labels") if isinstance(batch, Mapping) else None
    return mean(loss, share, outputs=logits, targets=targets)


def _objective(objective: Objective, model: Any, batch: Any, share: Share) -> Term:
    """What the user's own function says: a mean, a sum, or one of them with metrics."""
    loss, values = objective.compute(model, batch)
    if isinstance(loss, Sum):
        return _sum(loss, share, values=values)
    if not isinstance(loss, jax.Array) or (loss.ndim and len(loss) != share.examples):
        raise ModelError(
            "An objective returns the shard's mean loss as an array, one loss per example, "
            "lockstep.Sum(total, count), or (one of these, {name: value}). "
            f"Got {describe(loss)} for a shard of {share.examples}."
        )
    return mean(loss, share, values=values)


def parts(batch: Any) -> tuple[Any, Any, Any]:
    """The inputs, targets and example weights (or None) of a batch."""
    return split_batch(batch, 'weights.astype("float32")')


def inputs(loss: Any, batch: Any) -> Any:
    """What a linen module without variables will be called with."""
    if isinstance(loss, Objective):
        raise ModelError(
            "Under an objective nobody knows what a linen module is called with. Got one without variables. "
            "Give wrap (module, module.init(key, x))."
        )
    return batch if loss is None else parts(batch)[0]


def _compared(criterion: Any, model: Any, batch: Any, share: Share) -> Term:
    """A loss of (outputs, targets), with example weights where the batch has them."""
    inputs, targets, weights = parts(batch)
    with explain_missing_input(batch):
        outputs = call(model, inputs, share.examples)
    rest = {"outputs": outputs, "targets": targets, "labels": _labels(criterion, outputs, targets)}
    own = isinstance(criterion, CrossEntropy | SquaredError)
    if own and not isinstance(targets, jax.Array):
        raise BatchError(
            f"Targets are one array with a row per example. Got {describe(targets)}. Give such targets, or a function "
            "of (outputs, targets) as the loss."
        )
    value = criterion.values(outputs, targets) if own else read_sum(criterion(outputs, targets))
    counted = criterion.weights_of(targets, value) if own else None  # one for each value, or None
    if isinstance(value, Sum) and weights is None:
        return _sum(value, share, **rest)
    if not isinstance(value, jax.Array) or (value.ndim and len(value) != share.examples):
        raise ModelError(
            "A loss gives one number, one per example, or lockstep.Sum(total, count). "
            f"Got {describe(value)} for a shard of {share.examples}."
        )
    if weights is not None:
        value, counted = _weighted(value, counted, weights, share)
    summed = criterion.reduction == "sum" if own else share.summed and weights is None
    if summed:
        total = jnp.sum(value)
        return Term(total, total, 0.0, **rest)
    if counted is None:
        return mean(value, share, **rest)
    return _pair(jnp.sum(value), jnp.sum(counted), share, counted, **rest)


def _labels(criterion: Any, outputs: Any, targets: Any) -> tuple[int, int | None] | None:
    """The number of classes that the labels choose from, and the label left out; None where targets are no labels.

    JAX itself takes a label outside them for the last class, or for NaN.
    """
    of_labels = isinstance(criterion, CrossEntropy) or criterion is optax.softmax_cross_entropy_with_integer_labels
    if not of_labels or not isinstance(targets, jax.Array) or not jnp.issubdtype(targets.dtype, jnp.integer):
        return None
    return outputs.shape[-1], getattr(criterion, "ignore_index", None)


def _weighted(value: Any, counted: Any, weights: Any, share: Share) -> tuple[Any, Any]:
    """The values of the examples times their weights, and what each then counts."""
    shape = tuple(getattr(weights, "shape", ()))
    if not shape or weights.size != share.examples:
        raise BatchError(
            f"There is one weight per example. Got weights of shape {shape} for a shard of "
            f"{share.examples}. Give one number for each example."
        )
    if not value.ndim:
        raise ModelError(
            "Example weights need a loss that gives one value per example. Got one number for a shard of "
            f"{share.examples}. Return one value per example, or write an objective that returns "
            "lockstep.Sum(total, count)."
        )
    weights = weights.reshape(-1)
    if counted is None:  # (examples,)
        return value.reshape(len(value), -1).mean(1) * weights.astype(value.dtype), weights
    spread_out = weights.reshape(-1, *[1] * (value.ndim - 1))  # (examples, 1, ...)
    return value * spread_out.astype(value.dtype), counted * spread_out
