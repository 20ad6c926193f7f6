"""torch's losses: by what their own means divide, and which of them say how they reduce."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import array_ops
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Criterion, Share, Term, Weighing
from lockstep.errors import ModelError

WEIGHING = Weighing(array_ops, "weights.float()")

_BINARY = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_BINARY_FUNCTIONS = (nn.functional.binary_cross_entropy_with_logits, nn.functional.multilabel_soft_margin_loss)


def choose_term(loss: Any) -> Callable[[nn.Module, Any, Share], Term]:
    """The function (model, shard's batch, share) -> Term for what the script gave as loss, unless that is None."""
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss)
    function = _resolve(loss)
    if not callable(function):
        raise ModelError(
            f"A loss is a torch.nn loss, a function of (outputs, targets) or a lockstep.objective. Got {loss!r}."
        )
    return functools.partial(WEIGHING.compare, TorchCriterion(function))


def find_unknown(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how it reduces them."""
    function = _resolve(loss)
    own = getattr(type(function), "forward", function)
    own = own.func if isinstance(own, functools.partial) else own
    known = (getattr(own, "__module__", None) or "").startswith(("torch.nn.modules.loss", "torch.nn.functional"))
    return None if loss is None or isinstance(loss, Objective) or known or _is_sum(function) else function


def find_traits(loss: Any) -> LossTraits:
    """What named metrics need to know of the loss."""
    function, resolved = getattr(loss, "func", loss), _resolve(loss)
    probabilities = isinstance(loss, nn.BCELoss) or function is nn.functional.binary_cross_entropy
    binary = isinstance(loss, _BINARY) or any(function is each for each in _BINARY_FUNCTIONS)
    ignored = resolved.ignore_index if _is_of_classes(resolved) else None
    return LossTraits(ignored, axis=1, binary=binary or probabilities, threshold=0.5 if probabilities else 0.0)


class TorchCriterion(Criterion):
    """A loss of (outputs, targets); of torch's own loss over classes it is known what its mean divides by."""

    divides_by_targets = True

    @property
    def is_sum(self) -> bool:
        """Whether the loss says that it is a sum."""
        return _is_sum(self.function)

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Refuse class weights of another number, before a label is looked up in them."""
        weights = self.function.weight if _is_of_classes(self.function) else None
        if (
            weights is not None
            and isinstance(outputs, Tensor)
            and outputs.ndim > 1
            and len(weights) != outputs.shape[1]
        ):
            raise ModelError(
                f"Class weights are one for each class. Got {len(weights)} for {outputs.shape[1]} classes. "
                "Give one for each of the model's outputs."
            )

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """The classes of a loss that takes integers as labels."""
        if not (_is_of_classes(self.function) and _are_labels(targets)):
            return None
        has_classes = isinstance(outputs, Tensor) and outputs.ndim > 1
        return Labels(outputs.shape[1], self.function.ignore_index) if has_classes else None

    def compute_each(self, outputs: Any, targets: Any) -> Any:
        """The loss without its reduction; a sum over an example's elements if its mean is one of such sums."""
        values = _reduce(self.function, "none")(outputs, targets)
        if getattr(self.function, "reduction", None) == "batchmean" and isinstance(values, Tensor) and values.ndim:
            return values.reshape(len(values), -1).sum(1)
        return values

    def compute_sum(self, outputs: Any, targets: Any) -> Any:
        """torch's own sum."""
        return _reduce(self.function, "sum")(outputs, targets)

    def count(self, targets: Any) -> Any:
        """What each label weighs: 0 if it is ignored, else its class's weight."""
        if not (_is_of_classes(self.function) and self.function.reduction == "mean" and _are_labels(targets)):
            return None
        counted = targets != self.function.ignore_index
        if self.function.weight is None:
            return counted.double()
        weights: Tensor = self.function.weight.detach().double()
        return torch.where(counted, weights[torch.where(counted, targets, 0).long()], 0)

    def find_contributing(self, targets: Any, counted: Any) -> Any:
        """With label smoothing also labels whose own class weighs 0."""
        smoothed = getattr(self.function, "label_smoothing", 0.0) > 0
        return targets != self.function.ignore_index if smoothed else counted


def _resolve(loss: Any) -> Any:
    """The loss with torch's functional forms turned into the modules that say how they divide."""
    function, keywords = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    if function is nn.functional.cross_entropy:
        return nn.CrossEntropyLoss(**keywords)
    if function is nn.functional.nll_loss:
        return nn.NLLLoss(**keywords)
    return loss


def _are_labels(targets: Any) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def _is_of_classes(function: Any) -> bool:
    """Whether this is torch's own loss over classes; a subclass with a forward of its own is a loss we do not know."""
    return getattr(type(function), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def _reduce(function: Any, reduction: str) -> Any:
    """torch's own loss with another reduction; a loss of the script's as it is."""
    own = type(function).__module__.startswith("torch.nn") or _is_of_classes(function)
    if not own or not hasattr(function, "reduction"):
        return function
    function = copy.copy(function)
    function.reduction = reduction
    return function


def _is_sum(function: Any) -> bool:
    """Whether the loss says that it is a sum."""
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    return "sum" in (getattr(function, "reduction", None), keywords.get("reduction"))
