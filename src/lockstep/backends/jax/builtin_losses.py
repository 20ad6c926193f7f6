"""The losses that a script can choose by name on JAX: cross-entropy and squared error.

optax's functions return one value per example and leave the mean to the caller. The losses here also define what the
mean divides by, which depends on ignored labels and class weights.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax

from lockstep.backends.jax.array_ops import wide
from lockstep.errors import ModelError

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy of logits (..., classes) with labels (...), or with a probability for every class.

    With labels, the mean divides by the sum of the class weights of the labels that are not `ignore_index`. With
    probabilities, it divides by the number of examples, as in torch, and the class weights only multiply each class's
    part of the loss.
    """

    ignore_index: int | None = None
    weights: tuple[float, ...] | None = None
    reduction: str = "mean"

    def __post_init__(self) -> None:
        """Raises ModelError unless the reduction is 'mean' or 'sum'."""
        _check_reduction(self.reduction)

    def compute_values(self, outputs: Any, targets: Any) -> Any:
        """Returns the loss of each label; 0 for labels that are ignored."""
        if self.weights is not None and len(self.weights) != outputs.shape[-1]:
            raise ModelError(
                f"Class weights need one entry per class. Got {len(self.weights)} weights for {outputs.shape[-1]} "
                "classes. Give one weight for each of the model's outputs."
            )
        if jnp.issubdtype(targets.dtype, jnp.floating):
            return self._compute_from_probabilities(outputs, targets)
        if outputs.shape[:-1] != targets.shape:
            raise ModelError(
                f"Cross-entropy got outputs of shape {tuple(outputs.shape)} and labels of shape "
                f"{tuple(targets.shape)}, but needs logits (..., classes) and labels (...). Reshape the outputs or "
                "the labels."
            )
        # An ignored label may be outside the classes. Class 0 replaces it, and its loss is dropped below.
        counted = self._find_counted(targets)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.where(counted, targets, 0))
        factors = self.compute_weights(targets)
        return losses if factors is None else jnp.where(counted, losses * factors.astype(losses.dtype), 0)

    def compute_weights(self, targets: Any) -> Any:
        """Returns each label's weight in the mean; None if all weights are equal."""
        if jnp.issubdtype(targets.dtype, jnp.floating) or (self.ignore_index is None and self.weights is None):
            return None
        counted = self._find_counted(targets)
        if self.weights is None:
            return counted.astype(wide())
        return jnp.where(counted, jnp.asarray(self.weights, wide())[jnp.where(counted, targets, 0)], 0)

    def _compute_from_probabilities(self, outputs: Any, probabilities: Any) -> Any:
        """Returns the loss of each example; raises ModelError for ignore_index, or targets of another shape."""
        if self.ignore_index is not None:
            raise ModelError(
                f"Cross-entropy with ignore_index={self.ignore_index} got targets of {probabilities.dtype}, which are "
                "class probabilities, but ignore_index only works with integer labels. Leave ignore_index out, or give "
                "integer labels."
            )
        if outputs.shape != probabilities.shape:
            raise ModelError(
                f"Cross-entropy got outputs of shape {tuple(outputs.shape)} and class probabilities of shape "
                f"{tuple(probabilities.shape)} ({probabilities.dtype}), but both shapes must be equal. Reshape the "
                "targets, or give integer labels."
            )
        parts = probabilities
        if self.weights is not None:
            parts = parts * jnp.asarray(self.weights, parts.dtype)
        return optax.softmax_cross_entropy(outputs, parts)

    def _find_counted(self, targets: Any) -> Any:
        """Returns for each label whether it counts, which means that it is not ignored."""
        return jnp.ones(targets.shape, bool) if self.ignore_index is None else targets != self.ignore_index


@dataclass(frozen=True)
class SquaredError:
    """The squared error, averaged over all elements."""

    reduction: str = "mean"

    def __post_init__(self) -> None:
        """Raises ModelError unless the reduction is 'mean' or 'sum'."""
        _check_reduction(self.reduction)

    def compute_values(self, outputs: Any, targets: Any) -> Any:
        """Returns the loss of each example: the mean of its squared errors."""
        if outputs.shape != targets.shape:
            raise ModelError(
                f"The squared error got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}, but both shapes must be equal. Reshape the outputs or the targets."
            )
        return jnp.square(outputs - targets).reshape(len(outputs), -1).mean(1)

    def compute_weights(self, targets: Any) -> None:
        """Returns None, because all examples have equal weights."""


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ModelError(f"reduction={reduction!r} is not supported. Use 'mean' or 'sum'.")
