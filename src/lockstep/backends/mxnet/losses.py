"""Losses of MXNet: gluon's own, which give one value per example, and functions.

The plain loop adds the examples' losses: backward from the vector, then
`trainer.step(batch_size)` divides once, in the update. So do we: a shard gives the sum
over its examples, the shards add, and the update divides.

Only what is already on the host is looked at, so that no shard waits for another.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mxnet import autograd, gluon

from lockstep.backends.mxnet import array_ops, arrays, fused_loss, inputs
from lockstep.backends.mxnet.cross_entropy import CrossEntropy
from lockstep.core.batch_entries import check_example_weights
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Criterion, Share, Term, Weighing
from lockstep.errors import ModelError

NAMED: Mapping[str, Callable[[], Any]] = {
    "cross_entropy": gluon.loss.SoftmaxCrossEntropyLoss,
    "mse": lambda: gluon.loss.L2Loss(weight=2.0),  # gluon's own is half of it
    "mae": gluon.loss.L1Loss,
    "huber": gluon.loss.HuberLoss,
    "binary_cross_entropy": gluon.loss.SigmoidBinaryCrossEntropyLoss,
}


class MxnetWeighing(Weighing):
    """A mean over examples is a sum, which the update divides."""

    call = staticmethod(inputs.call)

    def mean(self, value: Any, share: Share, **rest: Any) -> Term:
        """One value per example, or the mean over the shard's examples.

        A mean becomes a sum, for shards of one example give both in one form; alone it is left as it is.
        """
        if value.ndim and value.shape[0] == share.examples:
            root = value if value.size == share.examples else value.reshape((share.examples, -1)).mean(axis=1)
            with autograd.pause():
                loss = arrays.total(root)
            return Term(root, loss, share.examples, per_example=True, **rest)
        root = value if share.alone else value * share.examples
        return Term(root, value, share.examples, times=share.examples, per_example=not share.alone, **rest)


WEIGHING = MxnetWeighing(array_ops, 'weights.astype("float32")')


def resolve(loss: Any) -> Any:
    """The loss that a name stands for; anything else as it is."""
    if not isinstance(loss, str):
        return loss
    if loss not in NAMED:
        raise ModelError(
            f"A loss's name is one of {', '.join(sorted(NAMED))}. Got {loss!r}. "
            "Use one of these, a gluon loss, a function of (outputs, targets), or a lockstep.objective."
        )
    named = NAMED[loss]()
    named.hybridize()
    return named


def choose_term(loss: Any) -> Callable[[Any, Any, Share], Term]:
    """The function (block, shard's batch, share) -> Term for what the script gave as loss."""
    if loss is None:
        return WEIGHING.weigh_model
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    if isinstance(loss, CrossEntropy) and fused_loss.known(loss):
        return functools.partial(WEIGHING.compare, CountingCriterion(loss))
    if fused_loss.known(loss):
        return functools.partial(WEIGHING.compare, GluonCriterion(loss))
    if not callable(loss):
        raise ModelError(
            f"A loss is a gluon loss, its name, a function of (outputs, targets) or a lockstep.objective. Got {loss!r}."
        )
    return functools.partial(WEIGHING.compare, MxnetCriterion(loss))


def find_unknown(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
    return None if loss is None or isinstance(loss, Objective) or fused_loss.known(loss) else loss


def find_traits(loss: Any) -> LossTraits:
    """What named metrics need to know of the loss."""
    binary = isinstance(loss, gluon.loss.SigmoidBinaryCrossEntropyLoss)
    threshold = 0.5 if binary and loss._from_sigmoid else 0.0
    return LossTraits(getattr(loss, "ignore_index", None), getattr(loss, "_axis", 1), binary, threshold, column=True)


class MxnetCriterion(Criterion):
    """A function of (outputs, targets)."""

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """The classes of gluon's cross-entropy of labels: MXNet takes the nearest for a label outside them."""
        loss = self.function
        of_labels = isinstance(loss, gluon.loss.SoftmaxCrossEntropyLoss) and loss._sparse_label
        if not of_labels or not arrays.is_array(outputs) or not arrays.is_array(targets):
            return None
        return Labels(outputs.shape[loss._axis], getattr(loss, "ignore_index", None))


class GluonCriterion(MxnetCriterion):
    """A loss of gluon's own, with one value per example."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self._graph = fused_loss.Scored(loss)

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Without example weights the losses and their sum come out of one graph."""
        if weights is None:
            values, total = self._graph(outputs, targets)
            if values.shape == (share.examples,):
                return Term(values, total, share.examples, per_example=True)
        return super().weigh(weighing, outputs, targets, weights, share)


class CountingCriterion(MxnetCriterion):
    """Our own cross-entropy: it multiplies by what each target weighs, and its mean divides by that."""

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Refuse class weights of another number."""
        loss = self.function
        classes = outputs.shape[loss._axis]
        if loss.weights is not None and len(loss.weights) != classes:
            raise ModelError(
                f"Class weights are one for each class. Got {len(loss.weights)} for {classes} classes. "
                "Give one for each of the block's outputs."
            )

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """The mean over the targets that count, each with what its class and its example weigh."""
        loss = self.function
        counted = loss.target_weights(array_ops.to_host(targets))
        if weights is not None:
            weights = array_ops.double(check_example_weights(array_ops, weights, share.examples))
            counted = counted * weights.reshape(-1, *[1] * (counted.ndim - 1))
        total = loss(outputs, targets, array_ops.cast_like(counted, outputs)).sum()
        return weighing.pair(total, counted.sum(), share, bool(counted.any()))
