"""A loss of (outputs, targets), with what is known about it: its reduction, and what its mean is divided by."""

from typing import TYPE_CHECKING, Any

from lockstep.core.target_kind import Labels

if TYPE_CHECKING:
    from lockstep.core.weighing import Share, Term, Weighing


class Criterion:
    """A loss of (outputs, targets) of which nothing is known except that it can be called.

    Backends derive classes from this one for the losses that they know.
    """

    adds_nothing_uncounted = False  # whether targets with a count of 0 add exactly 0 to the loss and to the gradient

    is_own = False  # whether no other code has the array that it returns

    def __init__(self, function: Any, call: Any = None) -> None:
        self.function = function
        self.call = function if call is None else call  # the function, or a compiled form of it

    @property
    def is_sum(self) -> bool:
        """Whether the loss is known to be a sum, for example because it has `reduction="sum"`."""
        return False

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Raises if the loss cannot be computed from these outputs and targets, for example because of their shapes."""

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns which labels are valid if the targets are class labels; returns None for any other targets."""
        return None

    def refuses_labels(self, targets: Any) -> bool:
        """Returns whether `compute` itself raises for invalid labels, so that they need no other check."""
        return False

    def compute(self, outputs: Any, targets: Any) -> Any:
        """Returns what the loss function returns: one number, one number per example, or a `Sum`."""
        return self.call(outputs, targets)

    def compute_each(self, outputs: Any, targets: Any) -> Any:
        """Returns the loss of each example or each target, without a reduction."""
        return self.compute(outputs, targets)

    def compute_sum(self, outputs: Any, targets: Any) -> Any:
        """Returns the sum of the loss over the counted targets; only called if `count` does not return None."""
        raise NotImplementedError

    def count(self, targets: Any) -> Any:
        """Returns how much each target counts in the divisor of the mean; None if every target counts 1.

        An ignored target counts 0, and with class weights a target counts the weight of its class.
        """
        return None

    def find_contributing(self, targets: Any, counted: Any) -> Any:
        """Returns an array that is nonzero for the targets that contribute to the loss."""
        return counted

    def weigh(self, weighing: "Weighing", outputs: Any, targets: Any, weights: Any, share: "Share") -> "Term":
        """Returns the shard's term of the batch's loss. A loss that applies example weights itself overrides this."""
        return weighing.weigh_outputs(self, outputs, targets, weights, share)
