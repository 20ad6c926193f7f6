"""Losses on MXNet: gluon's losses, which return one value per example, and the script's functions.

A plain gluon loop calls `backward` on the vector of the examples' losses, and `trainer.step(batch_size)` divides by
the number of examples in the update. Lockstep does the same: the gradient of a shard is a sum over its examples, the
shards' sums are added, and the update divides.

Only values that are already on the host are read, so that no shard waits for another shard.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mxnet import autograd, gluon

from lockstep.backends.mxnet import array_ops, arrays, fused_loss, inputs
from lockstep.backends.mxnet.cross_entropy import CrossEntropy
from lockstep.core.batch_entries import check_example_weights
from lockstep.core.criterion import Criterion
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Share, Term, Weighing
from lockstep.errors import ModelError

NAMED: Mapping[str, Callable[[], Any]] = {
    "cross_entropy": gluon.loss.SoftmaxCrossEntropyLoss,
    "mse": lambda: gluon.loss.L2Loss(weight=2.0),  # L2Loss halves the squared error
    "mae": gluon.loss.L1Loss,
    "huber": gluon.loss.HuberLoss,
    "binary_cross_entropy": gluon.loss.SigmoidBinaryCrossEntropyLoss,
}


class MxnetWeighing(Weighing):
    """Builds each loss's `Term` on MXNet: a mean over examples becomes a sum, which the update divides."""

    call = staticmethod(inputs.call)

    def mean(self, value: Any, share: Share, **rest: Any) -> Term:
        """Returns the `Term` of a loss with one value per example, or of a mean over the shard's examples.

        A mean is multiplied by the number of examples, because for a shard of one example a mean cannot be
        distinguished from one value per example. With one shard the mean is left as it is.
        """
        if value.ndim and value.shape[0] == share.examples:
            root = value if value.size == share.examples else value.reshape((share.examples, -1)).mean(axis=1)
            with autograd.pause():
                loss = arrays.sum_all(root)
            return Term(root, loss, share.examples, per_example=True, **rest)
        root = value if share.alone else value * share.examples
        return Term(root, value, share.examples, times=share.examples, per_example=not share.alone, **rest)


WEIGHING = MxnetWeighing(array_ops, 'weights.astype("float32")')


def resolve(loss: Any) -> Any:
    """Returns the named loss for a name such as 'mse', and any other loss as it is."""
    if not isinstance(loss, str):
        return loss
    if loss not in NAMED:
        raise ModelError(
            f"There is no loss named {loss!r}. Use one of {', '.join(sorted(NAMED))}, a gluon loss, "
            "a function of (outputs, targets), or a lockstep.objective."
        )
    named = NAMED[loss]()
    named.hybridize()
    return named


def choose_term(loss: Any) -> Callable[[Any, Any, Share], Term]:
    """Returns the function (block, shard's batch, share) -> Term for the script's loss."""
    if loss is None:
        return WEIGHING.weigh_model
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    if isinstance(loss, CrossEntropy) and fused_loss.is_gluon_loss(loss):
        return functools.partial(WEIGHING.compare, CountingCriterion(loss))
    if fused_loss.is_gluon_loss(loss):
        return functools.partial(WEIGHING.compare, GluonCriterion(loss))
    if not callable(loss):
        raise ModelError(
            f"loss={loss!r} is not a loss. Use a gluon loss, its name, a function of (outputs, targets) or a "
            "lockstep.objective."
        )
    return functools.partial(WEIGHING.compare, MxnetCriterion(loss))


def find_unknown(loss: Any) -> Callable[[Any, Any], Any] | None:
    """Returns the loss if its reduction is not known from its class; else None."""
    return None if loss is None or isinstance(loss, Objective) or fused_loss.is_gluon_loss(loss) else loss


def find_traits(loss: Any) -> LossTraits:
    """Returns what named metrics need to know about the loss."""
    binary = isinstance(loss, gluon.loss.SigmoidBinaryCrossEntropyLoss)
    threshold = 0.5 if binary and loss._from_sigmoid else 0.0
    return LossTraits(getattr(loss, "ignore_index", None), getattr(loss, "_axis", 1), binary, threshold, column=True)


class MxnetCriterion(Criterion):
    """A loss that is a function of (outputs, targets)."""

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns the valid labels for a cross-entropy of labels, because MXNet accepts others; else None."""
        loss = self.function
        of_labels = isinstance(loss, gluon.loss.SoftmaxCrossEntropyLoss) and loss._sparse_label
        if not of_labels or not arrays.is_array(outputs) or not arrays.is_array(targets):
            return None
        return Labels(outputs.shape[loss._axis], getattr(loss, "ignore_index", None))


class GluonCriterion(MxnetCriterion):
    """A loss class of gluon, which returns one value per example."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self._graph = fused_loss.FusedLoss(loss)

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Returns the loss's `Term`; without example weights, computes the losses and their sum in one graph."""
        if weights is None:
            values, total = self._graph(outputs, targets)
            if values.shape == (share.examples,):
                return Term(values, total, share.examples, per_example=True)
        return super().weigh(weighing, outputs, targets, weights, share)


class CountingCriterion(MxnetCriterion):
    """Lockstep's cross-entropy, whose mean divides by the sum of the targets' weights."""

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Raises ModelError if there are not as many class weights as classes."""
        loss = self.function
        classes = outputs.shape[loss._axis]
        if loss.weights is not None and len(loss.weights) != classes:
            raise ModelError(
                f"Class weights need one entry per class. Got {len(loss.weights)} weights for {classes} classes. Give "
                "one weight for each of the block's outputs."
            )

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Returns the `Term` of the mean over targets, weighted with the weights of their classes and examples."""
        loss = self.function
        counted = loss.target_weights(array_ops.to_host(targets))
        if weights is not None:
            weights = array_ops.double(check_example_weights(array_ops, weights, share.examples))
            counted = counted * weights.reshape(-1, *[1] * (counted.ndim - 1))
        total = loss(outputs, targets, array_ops.cast_like(counted, outputs)).sum()
        return weighing.pair(total, counted.sum(), share, bool(counted.any()))
