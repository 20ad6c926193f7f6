"""Losses: what a shard's loss weighs, so that the shards add up to the batch's own loss.

gluon's losses give one value per example, and the plain loop adds them: backward
from the vector, then `trainer.step(batch_size)` divides once, in the update. So do
we: a shard gives the sum over its examples, the shards add, and the update divides.
A loss that divides by something else (targets that count, example weights) is also
summed, and divided by that after the tree.

Only what is already on the host is looked at, so that no shard waits for another.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from mxnet import gluon

from lockstep.backends.mxnet import arrays, fused_loss
from lockstep.backends.mxnet.cross_entropy import CrossEntropy
from lockstep.backends.mxnet.fused_loss import Scored
from lockstep.backends.mxnet.inputs import call, host, put
from lockstep.core.batches import describe
from lockstep.core.objective import Objective, Sum, read_sum
from lockstep.core.weights import explain_missing_input, split_batch
from lockstep.errors import BatchError, ModelError

NAMED: Mapping[str, Callable[[], Any]] = {
    "cross_entropy": gluon.loss.SoftmaxCrossEntropyLoss,
    "mse": lambda: gluon.loss.L2Loss(weight=2.0),  # gluon's own is half of it
    "mae": gluon.loss.L1Loss,
    "huber": gluon.loss.HuberLoss,
    "binary_cross_entropy": gluon.loss.SigmoidBinaryCrossEntropyLoss,
}


class Share(NamedTuple):
    """A shard's part of the batch: its examples, the batch's, and whether it is all there is."""

    examples: int
    total: int
    alone: bool
    summed: bool = False  # whether a loss that does not say so itself is a sum


@dataclass(frozen=True)
class Term:
    """The loss of one shard: where the backward pass starts, and what the sums get."""

    root: Any  # None: this shard weighs nothing and has no gradient
    loss: Any  # an array whose sum it is
    weight: Any
    divided: bool = False  # by the weight, after the tree
    per_example: bool = False  # the gradient is a sum over examples, which the update divides
    times: int = 1  # how often the loss counts
    totalled: bool = False  # the loss is a number, or a vector of one in float64, already
    outputs: Any = None
    targets: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)  # an objective's own metrics


Terms = Callable[[Any, Any, Any, Share], Term]


def criterion(loss: Any) -> Any:
    """The loss itself, where it was given by its name."""
    if not isinstance(loss, str):
        return loss
    if loss not in NAMED:
        raise ModelError(
            f"A loss's name is one of {', '.join(sorted(NAMED))}. Got {loss!r}. "
            "Use one of these, a gluon loss, a function of (outputs, targets), or a lockstep.objective."
        )
    made = NAMED[loss]()
    made.hybridize()
    return made


def of(loss: Any) -> Terms:
    """The function (block, shard's batch, the same on the host, share) -> Term for whatever was given as loss."""
    if loss is None:
        return _models_own
    if isinstance(loss, Objective):
        return functools.partial(_objective, loss)
    if fused_loss.known(loss):
        return functools.partial(_compared, loss, fused_loss.Scored(loss))
    if not callable(loss):
        raise ModelError(
            f"A loss is a gluon loss, its name, a function of (outputs, targets) or a lockstep.objective. Got {loss!r}."
        )
    return functools.partial(_compared, loss, None)


def criterion_of(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
    return None if loss is None or isinstance(loss, Objective) or fused_loss.known(loss) else loss


def _mean(value: Any, share: Share, **rest: Any) -> Term:
    """One value per example, or the mean over the shard's examples.

    A mean becomes a sum, for shards of one example give both in one form; alone it is left as it is.
    """
    if value.ndim and value.shape[0] == share.examples:
        root = value if value.size == share.examples else value.reshape((share.examples, -1)).mean(axis=1)
        return Term(root, root, share.examples, per_example=True, **rest)
    if value.size != 1:
        raise ModelError(
            f"A loss gives one number, or one per example. Got {describe(value)} for a shard of {share.examples}."
        )
    root = value if share.alone else value * share.examples
    return Term(root, value, share.examples, per_example=not share.alone, times=share.examples, **rest)


def _pair(value: Any, weight: Any, share: Share, counted: Any = None, **rest: Any) -> Term:
    """A sum over the shard and what it is to be divided by, which is on the host or waited for.

    `counted` are the weights that add up to it, where known: those of both signs may cancel in a shard that has a
    gradient all the same. A batch in which they do is refused. A sum whose weight is 0 counts too, unless it is 0 / 0
    as in a shard without anything to count.
    """
    number = float(host(weight))
    if share.alone:
        counts = number != 0
    elif counted is not None:
        counts = bool(counted.any())
    else:
        counts = number != 0 or _is_something(float(host(value)))
    if not counts:
        return Term(None, 0.0, 0.0, True, totalled=True, **rest)
    if share.alone:
        return Term(value / number, value, number, **rest)
    return Term(value, value, number, True, **rest)


def _sum(loss: Sum, share: Share, **rest: Any) -> Term:
    """A sum, which is divided only if it has a count."""
    if loss.count is None:
        return Term(loss.total, loss.total, 0.0, **rest)
    return _pair(*loss, share, **rest)


def _is_something(number: float) -> bool:
    return math.isfinite(number) and number != 0


def _models_own(block: Any, batch: Any, known: Any, share: Share) -> Term:
    """The loss that the block's output carries."""
    outputs = call(block, batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not arrays.is_array(loss):
        raise ModelError(
            "Without a loss the model's output carries one as `.loss`. "
            f"Got {describe(outputs)}. Give wrap a loss, or return an output with `.loss`."
        )
    return _mean(loss, share)


def _objective(objective: Objective, block: Any, batch: Any, known: Any, share: Share) -> Term:
    """What the user's own function says: a mean, a sum, or one of them with metrics."""
    loss, values = objective.compute(block, batch)
    if isinstance(loss, Sum):
        return _sum(loss, share, values=values)
    if not arrays.is_array(loss):
        raise ModelError(
            "An objective returns the shard's mean loss as an array, one loss per example, "
            "lockstep.Sum(total, count), or (one of these, {name: value}). "
            f"Got {describe(loss)} for a shard of {share.examples}."
        )
    return _mean(loss, share, values=values)


def _compared(loss: Any, graph: Scored | None, block: Any, batch: Any, known: Any, share: Share) -> Term:
    """A loss of (outputs, targets), with example weights where the batch has them."""
    inputs, targets, weights = split_batch(batch, 'weights.astype("float32")')
    with explain_missing_input(batch):
        outputs = call(block, inputs)
    rest = {"outputs": outputs, "targets": targets}
    on_host = host(known[1])
    _check_labels(loss, outputs, on_host)
    example_weights = None if weights is None else _example_weights(host(known[2]), share)
    if isinstance(loss, CrossEntropy):
        return _counted(loss, outputs, targets, on_host, example_weights, share, rest)
    if graph is not None and weights is None:
        values, total = graph(outputs, targets)
        if values.shape == (share.examples,):
            return Term(values, total, share.examples, per_example=True, totalled=True, **rest)
    value = read_sum(loss(outputs, targets))
    if isinstance(value, Sum) and weights is None:
        return _sum(value, share, **rest)
    if not arrays.is_array(value):
        raise ModelError(
            "A loss gives one number, one per example, or lockstep.Sum(total, count). "
            f"Got {describe(value)} for a shard of {share.examples}."
        )
    if share.summed and weights is None:
        return _sum(Sum(value), share, **rest)
    if example_weights is None:
        return _mean(value, share, **rest)
    if not value.ndim or value.shape[0] != share.examples:
        raise ModelError(
            f"Example weights need a loss that gives one value per example. Got {describe(value)} for a shard of "
            f"{share.examples}. Return one value per example, or write an objective that returns "
            "lockstep.Sum(total, count)."
        )
    each = value if value.size == share.examples else value.reshape((share.examples, -1)).mean(axis=1)
    return _pair((each * _like(example_weights, each)).sum(), example_weights.sum(), share, example_weights, **rest)


def _counted(
    loss: CrossEntropy, outputs: Any, targets: Any, on_host: Any, weights: Any, share: Share, rest: Mapping[str, Any]
) -> Term:
    """The mean over the targets that count, each with what its class and its example weigh."""
    classes = outputs.shape[loss._axis]
    if loss.class_weights is not None and len(loss.class_weights) != classes:
        raise ModelError(
            f"Class weights are one for each class. Got {len(loss.class_weights)} for {classes} classes. "
            "Give one for each of the block's outputs."
        )
    each = loss.target_weights(on_host)
    if weights is not None:
        each = each * weights.reshape(-1, *[1] * (each.ndim - 1))
    return _pair(loss(outputs, targets, _like(each, outputs)).sum(), each.sum(), share, each, **rest)


def _like(values: Any, array: Any) -> Any:
    """Numbers of the host beside an array, in its type."""
    return put(values.astype(arrays.dtype_of(array)), array.ctx, wide=True)


def _example_weights(weights: Any, share: Share) -> Any:
    weights = np.asarray(weights, "float64")
    if weights.size != share.examples:
        raise BatchError(
            f"There is one weight per example. Got weights of shape {weights.shape} for a shard of "
            f"{share.examples}. Give one number for each example."
        )
    return weights.reshape(-1)


def _check_labels(loss: Any, outputs: Any, targets: Any) -> None:
    """Raises where a label names no class: MXNet would take the nearest and say nothing."""
    if not isinstance(loss, gluon.loss.SoftmaxCrossEntropyLoss) or not loss._sparse_label:
        return
    if not isinstance(targets, np.ndarray) or not arrays.is_array(outputs):
        return
    classes = outputs.shape[loss._axis]
    ignored = getattr(loss, "ignore_label", None)
    counted = targets if ignored is None else targets[targets != ignored]
    if counted.size and not (counted.min() >= 0 and counted.max() < classes):  # NaN is neither
        raise BatchError(
            f"Labels run from 0 to {classes - 1}, for the model gives {classes} outputs. "
            f"Got labels from {counted.min()} to {counted.max()}. Mend the labels, or the last layer."
        )
