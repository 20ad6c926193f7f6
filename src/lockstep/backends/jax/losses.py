"""Losses of JAX: those that go by a name, optax's functions, and functions of the script's own."""

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
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Criterion, Share, Term, Weighing
from lockstep.errors import BatchError, ModelError

_AS_FLOATS = 'weights.astype("float32")'
WEIGHING = Weighing(array_ops, _AS_FLOATS)

_ONE_PER_EXAMPLE = ("optax.losses._classification", "optax.losses._regression")  # what their functions give
NAMED: dict[str, Any] = {"cross_entropy": CrossEntropy(), "mse": SquaredError()}


def choose_term(loss: Any) -> Callable[[Any, Any, Share], Term]:
    """The function (bound model, shard's batch, share) -> Term for what the script gave as loss."""
    if loss is None:
        return WEIGHING.weigh_model
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    function = resolve(loss)
    if isinstance(function, CrossEntropy | SquaredError):
        return functools.partial(WEIGHING.compare, BuiltinCriterion(function))
    if not callable(function):
        raise ModelError(
            f"A loss is one of {', '.join(map(repr, NAMED))}, a function of (outputs, targets) such as optax's, or a "
            f"lockstep.objective. Got {loss!r}."
        )
    return functools.partial(WEIGHING.compare, JaxCriterion(function))


def resolve(loss: Any) -> Any:
    """The loss that a name stands for; anything else as it is."""
    return NAMED.get(loss, loss) if isinstance(loss, str) else loss


def find_unknown(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
    function = resolve(loss)
    own = function.func if isinstance(function, functools.partial) else function
    known = loss is None or isinstance(loss, Objective) or isinstance(function, CrossEntropy | SquaredError)
    return None if known or (getattr(own, "__module__", None) or "") in _ONE_PER_EXAMPLE else function


def find_traits(loss: Any) -> LossTraits:
    """What named metrics need to know of the loss."""
    binary = getattr(loss, "func", loss) is optax.sigmoid_binary_cross_entropy
    return LossTraits(getattr(resolve(loss), "ignore_index", None), binary=binary)


def find_inputs(loss: Any, batch: Any) -> Any:
    """What a linen module without variables will be called with."""
    if isinstance(loss, Objective):
        raise ModelError(
            "Under an objective nobody knows what a linen module is called with. Got one without variables. "
            "Give wrap (module, module.init(key, x))."
        )
    return batch if loss is None else split_batch(batch, _AS_FLOATS)[0]


class JaxCriterion(Criterion):
    """A function of (outputs, targets)."""

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Refuse outputs without a row for every example: XLA would compute with them."""
        if isinstance(outputs, jax.Array) and outputs.shape[:1] != (examples,):
            raise ModelError(
                f"A model's outputs have one row per example on axis 0. Got shape {tuple(outputs.shape)} for a shard "
                f"of {examples}. Return such outputs."
            )

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """The classes of optax's function of labels: XLA takes a label outside them for the last, or for NaN."""
        of_labels = self.function is optax.softmax_cross_entropy_with_integer_labels
        return Labels(outputs.shape[-1]) if of_labels and _are_labels(targets) else None


class BuiltinCriterion(JaxCriterion):
    """One of the losses that go by a name."""

    @property
    def is_sum(self) -> bool:
        """Whether it was made with reduction="sum"."""
        return bool(self.function.reduction == "sum")

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Refuse targets that are more than one array."""
        super().check(outputs, targets, examples)
        if not isinstance(targets, jax.Array):
            raise BatchError(
                f"Targets are one array with a row per example. Got {describe(targets)}. Give such targets, or a "
                "function of (outputs, targets) as the loss."
            )

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """The classes of cross-entropy."""
        if not isinstance(self.function, CrossEntropy) or not _are_labels(targets):
            return None
        return Labels(outputs.shape[-1], self.function.ignore_index)

    def compute(self, outputs: Any, targets: Any) -> Any:
        """The sum, or the values whose mean is the loss."""
        values = self.function.values(outputs, targets)
        return jnp.sum(values) if self.is_sum else values

    def compute_each(self, outputs: Any, targets: Any) -> Any:
        """One value per label."""
        return self.function.values(outputs, targets)

    def compute_sum(self, outputs: Any, targets: Any) -> Any:
        """Their sum."""
        return jnp.sum(self.function.values(outputs, targets))

    def count(self, targets: Any) -> Any:
        """What each label counts."""
        return self.function.weights_of(targets)


def _are_labels(targets: Any) -> bool:
    return isinstance(targets, jax.Array) and bool(jnp.issubdtype(targets.dtype, jnp.integer))
