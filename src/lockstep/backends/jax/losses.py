"""Losses on JAX: Lockstep's named losses, optax's functions, and the script's own functions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lockstep.backends.jax import array_ops
from lockstep.backends.jax.builtin_losses import CrossEntropy, SquaredError
from lockstep.core.batch_entries import split_batch
from lockstep.core.batches import describe
from lockstep.core.criterion import Criterion
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Share, Term, Weighing
from lockstep.errors import BatchError, ModelError

_AS_FLOATS = 'weights.astype("float32")'  # for messages: what to write for weights that are not floats
WEIGHING = Weighing(array_ops, _AS_FLOATS)

# Modules of optax whose functions return one value per example.
_ONE_PER_EXAMPLE = ("optax.losses._classification", "optax.losses._regression")
NAMED_LOSSES: dict[str, Any] = {"cross_entropy": CrossEntropy(), "mse": SquaredError()}


def choose_term(loss: Any) -> Callable[[Any, Any, Share], Term]:
    """Returns the function (bound model, shard's batch, share) -> Term for the script's loss."""
    if loss is None:
        return WEIGHING.weigh_model
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    function = resolve_name(loss)
    if isinstance(function, CrossEntropy | SquaredError):
        return functools.partial(WEIGHING.compare, BuiltinCriterion(function))
    if not callable(function):
        raise ModelError(
            f"loss={loss!r} is not a loss. Use one of {', '.join(map(repr, NAMED_LOSSES))}, a function of (outputs, "
            "targets) such as optax's, or a lockstep.objective."
        )
    return functools.partial(WEIGHING.compare, JaxCriterion(function))


def resolve_name(loss: Any) -> Any:
    """Returns the named loss for a name such as 'mse', and any other loss as it is."""
    return NAMED_LOSSES.get(loss, loss) if isinstance(loss, str) else loss


def find_criterion(loss: Any) -> Callable[[Any, Any], Any] | None:
    """Returns the loss if it is a function of (outputs, targets) whose reduction is not known, else None."""
    function = resolve_name(loss)
    inner = function.func if isinstance(function, functools.partial) else function
    is_known = loss is None or isinstance(loss, Objective) or isinstance(function, CrossEntropy | SquaredError)
    return None if is_known or (getattr(inner, "__module__", None) or "") in _ONE_PER_EXAMPLE else function


def find_traits(loss: Any) -> LossTraits:
    """Returns the properties of the loss on which named metrics depend."""
    binary = getattr(loss, "func", loss) is optax.sigmoid_binary_cross_entropy
    return LossTraits(getattr(resolve_name(loss), "ignore_index", None), binary=binary)


def find_inputs(loss: Any, batch: Any) -> Any:
    """Returns the part of a batch from which a linen module without variables is initialized: the model's inputs."""
    if isinstance(loss, Objective):
        raise ModelError(
            "The linen module has no variables, and Lockstep cannot initialize it, because the objective may call it "
            "with any inputs. Give lockstep.wrap (module, module.init(key, x)) as the model."
        )
    return batch if loss is None else split_batch(batch, _AS_FLOATS)[0]


class JaxCriterion(Criterion):
    """A loss that is a function of (outputs, targets)."""

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Raises ModelError if the outputs do not have a row for every example; XLA would broadcast them in silence."""
        if isinstance(outputs, jax.Array) and outputs.shape[:1] != (examples,):
            raise ModelError(
                f"The model returned outputs of shape {tuple(outputs.shape)} for a shard of {examples} examples. "
                "Return one row per example, on axis 0."
            )

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns the valid labels for optax's cross-entropy of labels, because XLA accepts others; else None."""
        takes_labels = self.function is optax.softmax_cross_entropy_with_integer_labels
        return Labels(outputs.shape[-1]) if takes_labels and _has_labels(targets) else None


class BuiltinCriterion(JaxCriterion):
    """One of Lockstep's own losses on JAX, chosen by its name: 'cross_entropy' or 'mse'."""

    @property
    def is_sum(self) -> bool:
        """Whether the loss has reduction="sum"."""
        return bool(self.function.reduction == "sum")

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Raises an error if the targets are not one array, or if the outputs do not have a row for every example."""
        super().check(outputs, targets, examples)
        if not isinstance(targets, jax.Array):
            raise BatchError(
                f"The loss {type(self.function).__name__} needs the targets as one array. Got {describe(targets)}. "
                "Give one array with a row per example, or a function of (outputs, targets) as the loss."
            )

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns the valid labels for cross-entropy; None for other losses and for class probabilities."""
        if not isinstance(self.function, CrossEntropy) or not _has_labels(targets):
            return None
        return Labels(outputs.shape[-1], self.function.ignore_index)

    def compute(self, outputs: Any, targets: Any) -> Any:
        """Returns the loss's sum if its reduction is "sum", else the values whose mean is the loss."""
        values = self.function.compute_values(outputs, targets)
        return jnp.sum(values) if self.is_sum else values

    def compute_each(self, outputs: Any, targets: Any) -> Any:
        """Returns one loss value per label."""
        return self.function.compute_values(outputs, targets)

    def compute_sum(self, outputs: Any, targets: Any) -> Any:
        """Returns the sum of the loss values of all labels."""
        return jnp.sum(self.function.compute_values(outputs, targets))

    def count(self, targets: Any) -> Any:
        """Returns each label's weight in the mean; None if all weights are equal."""
        return self.function.compute_weights(targets)


def _has_labels(targets: Any) -> bool:
    """Returns whether the targets are an array of integers, and so labels instead of class probabilities."""
    return isinstance(targets, jax.Array) and bool(jnp.issubdtype(targets.dtype, jnp.integer))
