"""Losses for plain TensorFlow: Keras losses, which reduce, mask and weigh as in Keras, and the script's functions."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.backends.keras_losses import is_of_keras
from lockstep.backends.tensorflow import array_ops
from lockstep.backends.tensorflow.array_ops import double
from lockstep.core.criterion import Criterion
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective, Sum
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Counted, Share, Term, Weighing
from lockstep.errors import ModelError

Call = Callable[[Any], Any]  # a model that takes all inputs as one argument

# Names and not classes, because Keras may not be imported.
_BINARY = ("BinaryCrossentropy", "BinaryFocalCrossentropy")
_LABEL_LOSSES = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy")


def call_program(model: Call, inputs: Any) -> Any:
    """Calls a model that takes all inputs as one argument."""
    return model(inputs)


class TensorflowWeighing(Weighing):
    """Weighs the shards' losses for models that take all inputs as one argument."""

    call = staticmethod(call_program)


WEIGHING = TensorflowWeighing(array_ops, "tf.cast(weights, tf.float32)")


def choose_term(loss: Any) -> Callable[[Call, Any, Share], Term]:
    """Returns the function (model, shard's batch, share) -> Term for the script's loss."""
    if loss is None:
        return WEIGHING.weigh_model
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    return functools.partial(WEIGHING.compare, _choose_criterion(loss))


def find_traits(loss: Any) -> LossTraits:
    """Returns the properties of the loss on which named metrics depend."""
    binary = type(loss).__name__ in _BINARY
    threshold = 0.5 if binary and not loss.get_config().get("from_logits") else 0.0
    return LossTraits(getattr(loss, "ignore_class", None), binary=binary, threshold=threshold)


def find_criterion(loss: Any) -> Callable[[Any, Any], Any] | None:
    """Returns the loss as a function of (outputs, targets); None if its reduction is known."""
    is_known = isinstance(loss, Objective | str) or is_of_keras(loss) or getattr(loss, "reduction", None) == "sum"
    return None if loss is None or is_known else _choose_criterion(loss).compute


class TensorflowCriterion(Criterion):
    """A loss that is a function of (outputs, targets)."""

    def __init__(self, function: Callable[[Any, Any], Any], has_labels: bool = False) -> None:
        super().__init__(function)
        self._has_labels = has_labels

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns the valid labels for a cross-entropy of labels, because on a GPU others give NaN; else None."""
        return Labels(outputs.shape[-1]) if self._has_labels else None


class KerasCriterion(Criterion):
    """A Keras loss, which takes example weights itself."""

    @property
    def is_sum(self) -> bool:
        """Whether the loss was created with reduction="sum"."""
        return bool(self.function.reduction == "sum")

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns the valid labels for a cross-entropy of labels; None for other losses."""
        has_labels = type(self.function).__name__ in _LABEL_LOSSES
        return Labels(outputs.shape[-1], getattr(self.function, "ignore_class", None)) if has_labels else None

    def compute(self, outputs: Any, targets: Any) -> Any:
        """Returns the loss; Keras's losses take the targets before the outputs."""
        return self.function(targets, outputs)

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Returns the `Term` of a shard; with the loss's own denominator if weights or a mask change it."""
        value = self.function(targets, outputs, sample_weight=weights)
        if self.is_sum or (share.summed and weights is None):
            return weighing.sum(Sum(value), share)
        counted = self._find_denominator(outputs, targets, weights)
        if counted is None:
            return weighing.mean(value, share)
        return weighing.own_mean(value, counted, share)

    def _find_denominator(self, outputs: Any, targets: Any, weights: Any) -> Counted | None:
        """Returns the number by which the loss's mean divides; None if it is the number of the loss's values."""
        # Keras attaches the mask of `ignore_class` to the values, so they are computed a second time here.
        values = self.function.call(targets, tf.cast(outputs, self.function.dtype))
        mask = getattr(values, "_keras_mask", None)
        if self.function.reduction != "mean_with_sample_weight" or weights is None:
            if mask is None:
                return None
            weight = tf.reduce_sum(double(mask))
            return Counted(weight, weight != 0)
        counted = _broadcast_weights(weights, values)
        counted = counted if mask is None else tf.where(tf.cast(mask, tf.bool), counted, 0)
        total = tf.reduce_sum(values * tf.cast(counted, values.dtype))
        return Counted(tf.reduce_sum(counted), tf.reduce_any(counted != 0), total)


def _broadcast_weights(weights: Any, values: Any) -> Any:
    """Returns the example weights, repeated so that every value of the loss has a weight."""
    shape = [*weights.shape, *[1] * (values.shape.rank - weights.shape.rank)]
    return tf.broadcast_to(tf.reshape(double(weights), shape), values.shape)


def _choose_criterion(loss: Any) -> Criterion:
    """Returns the criterion for a Keras loss, a name, or a function of (outputs, targets)."""
    if isinstance(loss, str):
        return _find_named_criterion(loss)
    if isinstance(loss, tf.keras.losses.Loss):
        return KerasCriterion(loss)
    if not callable(loss):
        raise ModelError(
            "The loss must be a Keras loss, a name, a function of (outputs, targets) or a lockstep.objective. "
            f"Got {loss!r}. Use for example loss='cross_entropy'."
        )
    is_keras_function = getattr(loss, "__module__", "").startswith("keras.")
    return _swap_arguments(loss) if is_keras_function else TensorflowCriterion(loss)


def _find_named_criterion(name: str) -> Criterion:
    if name == "cross_entropy":
        return TensorflowCriterion(_cross_entropy, has_labels=True)
    try:
        return _swap_arguments(tf.keras.losses.get(name))
    except ValueError:
        raise ModelError(
            f"There is no loss called {name!r}. Use 'cross_entropy' (of logits and class indices), the name of a Keras "
            "loss, a Keras loss, a function of (outputs, targets) or a lockstep.objective."
        ) from None


def _cross_entropy(outputs: Any, targets: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)


def _swap_arguments(function: Any) -> Criterion:
    """Returns the criterion for one of Keras's loss functions, which take the targets before the outputs."""
    has_labels = getattr(function, "__name__", "") in _LABEL_LOSSES
    return TensorflowCriterion(lambda outputs, targets: function(targets, outputs), has_labels)
