"""Losses of TensorFlow: Keras's with Keras's own meaning of reductions, masks and weights, and functions."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.backends.keras_losses import is_of_keras
from lockstep.backends.tensorflow import array_ops
from lockstep.backends.tensorflow.array_ops import double
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective, Sum
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Counted, Criterion, Share, Term, Weighing
from lockstep.errors import ModelError

Call = Callable[[Any], Any]

_BINARY = ("BinaryCrossentropy", "BinaryFocalCrossentropy")  # Keras's, which need not be imported
_OF_LABELS = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy")


def call_program(model: Call, inputs: Any) -> Any:
    """Return the outputs of a program, which spreads its inputs itself."""
    return model(inputs)


class TensorflowWeighing(Weighing):
    """Losses of programs."""

    call = staticmethod(call_program)


WEIGHING = TensorflowWeighing(array_ops, "tf.cast(weights, tf.float32)")


def choose_term(loss: Any) -> Callable[[Call, Any, Share], Term]:
    """The function (model, shard's batch, share) -> Term for what the script gave as loss."""
    if loss is None:
        return WEIGHING.weigh_model
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    return functools.partial(WEIGHING.compare, _choose_criterion(loss))


def find_traits(loss: Any) -> LossTraits:
    """What named metrics need to know of the loss."""
    binary = type(loss).__name__ in _BINARY
    threshold = 0.5 if binary and not loss.get_config().get("from_logits") else 0.0
    return LossTraits(getattr(loss, "ignore_class", None), binary=binary, threshold=threshold)


def find_unknown(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
    known = isinstance(loss, Objective | str) or is_of_keras(loss) or getattr(loss, "reduction", None) == "sum"
    return None if loss is None or known else _choose_criterion(loss).compute


class TensorflowCriterion(Criterion):
    """A function of (outputs, targets)."""

    def __init__(self, function: Callable[[Any, Any], Any], of_labels: bool = False) -> None:
        super().__init__(function)
        self._of_labels = of_labels

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """The classes of a cross-entropy of labels: on a GPU TensorFlow gives NaN for a label outside them."""
        return Labels(outputs.shape[-1]) if self._of_labels else None


class KerasCriterion(Criterion):
    """A Keras loss, which takes example weights itself."""

    @property
    def is_sum(self) -> bool:
        """Whether it was made with reduction="sum"."""
        return bool(self.function.reduction == "sum")

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """The classes of a cross-entropy of labels."""
        of_labels = type(self.function).__name__ in _OF_LABELS
        return Labels(outputs.shape[-1], getattr(self.function, "ignore_class", None)) if of_labels else None

    def compute(self, outputs: Any, targets: Any) -> Any:
        """Keras takes the targets first."""
        return self.function(targets, outputs)

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Keras's own mean, by what it divides."""
        value = self.function(targets, outputs, sample_weight=weights)
        if self.is_sum or (share.summed and weights is None):
            return weighing.sum(Sum(value), share)
        counted = self._count(outputs, targets, weights)
        if counted is None:
            return weighing.mean(value, share)
        return weighing.own_mean(value, counted, share)

    def _count(self, outputs: Any, targets: Any, weights: Any) -> Counted | None:
        """By what the loss's mean divides; None if that is the number of its values."""
        values = self.function.call(targets, tf.cast(outputs, self.function.dtype))
        mask = getattr(values, "_keras_mask", None)
        if self.function.reduction != "mean_with_sample_weight" or weights is None:
            if mask is None:
                return None
            weight = tf.reduce_sum(double(mask))
            return Counted(weight, weight != 0)
        counted = _spread(weights, values)
        counted = counted if mask is None else tf.where(tf.cast(mask, tf.bool), counted, 0)
        total = tf.reduce_sum(values * tf.cast(counted, values.dtype))
        return Counted(tf.reduce_sum(counted), tf.reduce_any(counted != 0), total)


def _spread(weights: Any, values: Any) -> Any:
    """One weight for every value."""
    shape = [*weights.shape, *[1] * (values.shape.rank - weights.shape.rank)]
    return tf.broadcast_to(tf.reshape(double(weights), shape), values.shape)


def _choose_criterion(loss: Any) -> Criterion:
    """A Keras loss, or a function of (outputs, targets)."""
    if isinstance(loss, str):
        return _name_criterion(loss)
    if isinstance(loss, tf.keras.losses.Loss):
        return KerasCriterion(loss)
    if not callable(loss):
        raise ModelError(
            f"A loss is a Keras loss, a function of (outputs, targets) or a lockstep.objective. Got {loss!r}."
        )
    return _swap(loss) if getattr(loss, "__module__", "").startswith("keras.") else TensorflowCriterion(loss)


def _name_criterion(name: str) -> Criterion:
    if name == "cross_entropy":
        return TensorflowCriterion(_cross_entropy, of_labels=True)
    try:
        return _swap(tf.keras.losses.get(name))
    except ValueError:
        raise ModelError(
            f"A loss's name is 'cross_entropy' (of logits and class indices) or one of Keras's. Got {name!r}. "
            "Use one of these, a Keras loss, a function of (outputs, targets) or a lockstep.objective."
        ) from None


def _cross_entropy(outputs: Any, targets: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def _swap(function: Any) -> Criterion:
    """A function of Keras's, which takes the targets first."""
    of_labels = getattr(function, "__name__", "") in _OF_LABELS
    return TensorflowCriterion(lambda outputs, targets: function(targets, outputs), of_labels)
