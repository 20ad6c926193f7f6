"""The losses that go by a name, for what optax's functions cannot say.

optax gives one value per example and leaves the mean to the caller. What a mean
divides by (targets that count, class weights) stands here.
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

    The mean divides by the labels that are not `ignore_index`, each with its
    class's weight. With probabilities it divides by the examples, as torch's does: a class's
    weight multiplies its part of the loss.
    """

    ignore_index: int | None = None
    weights: tuple[float, ...] | None = None
    reduction: str = "mean"

    def __post_init__(self) -> None:
        """Refuses a reduction that is none."""
        _check(self.reduction)

    def values(self, outputs: Any, targets: Any) -> Any:
        """One value per label; those that do not count are 0."""
        if self.weights is not None and len(self.weights) != outputs.shape[-1]:
            raise ModelError(
                f"Class weights are one for each class. Got {len(self.weights)} for {outputs.shape[-1]} classes. "
                "Give one for each of the model's outputs."
            )
        if jnp.issubdtype(targets.dtype, jnp.floating):
            return self._compute_from_probabilities(outputs, targets)
        if outputs.shape[:-1] != targets.shape:
            raise ModelError(
                "Cross-entropy compares logits of shape (..., classes) with labels of shape (...). Got "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape one of them."
            )
        counted = self._counted(targets)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.where(counted, targets, 0))
        factors = self.weights_of(targets)
        return losses if factors is None else jnp.where(counted, losses * factors.astype(losses.dtype), 0)

    def weights_of(self, targets: Any) -> Any:
        """What every label counts in the mean; None where all count alike."""
        if jnp.issubdtype(targets.dtype, jnp.floating) or (self.ignore_index is None and self.weights is None):
            return None
        counted = self._counted(targets)
        if self.weights is None:
            return counted.astype(wide())
        return jnp.where(counted, jnp.asarray(self.weights, wide())[jnp.where(counted, targets, 0)], 0)

    def _compute_from_probabilities(self, outputs: Any, probabilities: Any) -> Any:
        if self.ignore_index is not None:
            raise ModelError(
                f"ignore_index only works with integer labels, not with class probabilities. Got "
                f"ignore_index={self.ignore_index} and targets of {probabilities.dtype}. Leave ignore_index out, or "
                "give integer labels."
            )
        if outputs.shape != probabilities.shape:
            raise ModelError(
                "Cross-entropy compares logits with class probabilities of the same shape. Got "
                f"{tuple(outputs.shape)} and {tuple(probabilities.shape)} of {probabilities.dtype}. Reshape one of "
                "them, or give integer labels."
            )
        parts = probabilities
        if self.weights is not None:
            parts = parts * jnp.asarray(self.weights, parts.dtype)
        return optax.softmax_cross_entropy(outputs, parts)

    def _counted(self, targets: Any) -> Any:
        return jnp.ones(targets.shape, bool) if self.ignore_index is None else targets != self.ignore_index


@dataclass(frozen=True)
class SquaredError:
    """The squared error, averaged over all elements."""

    reduction: str = "mean"

    def __post_init__(self) -> None:
        """Refuses a reduction that is none."""
        _check(self.reduction)

    def values(self, outputs: Any, targets: Any) -> Any:
        """One value per example: the mean over its elements."""
        if outputs.shape != targets.shape:
            raise ModelError(
                "Squared error compares outputs and targets of one shape. Got "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape one of them."
            )
        return jnp.square(outputs - targets).reshape(len(outputs), -1).mean(1)

    def weights_of(self, targets: Any) -> None:
        """All count alike."""


def _check(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ModelError(f"A reduction is 'mean' or 'sum'. Got {reduction!r}. Use one of these.")
