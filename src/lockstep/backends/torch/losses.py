"""Losses on PyTorch: what the means of torch's own losses divide by, and whether a loss is a sum or a mean."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import array_ops
from lockstep.backends.torch.shard_compiler import ShardCompiler
from lockstep.core.criterion import Criterion
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Share, Term, Weighing
from lockstep.errors import ModelError

_AS_FLOATS = "weights.float()"
WEIGHING = Weighing(array_ops, _AS_FLOATS)

_BINARY = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_BINARY_FUNCTIONS = (nn.functional.binary_cross_entropy_with_logits, nn.functional.multilabel_soft_margin_loss)


def choose_term(loss: Any, compiler: ShardCompiler) -> Callable[[nn.Module, Any, Share], Term]:
    """Returns the function (model, shard's batch, share) -> Term for the script's loss, which is not None."""
    if isinstance(loss, Objective):
        return functools.partial(WEIGHING.weigh_objective, loss, function=compiler.compile(loss.function))
    function = _resolve(loss)
    if not callable(function):
        raise ModelError(
            f"loss={loss!r} is not a loss. Use a torch.nn loss, a function of (outputs, targets) or a "
            "lockstep.objective."
        )
    weighing = Weighing(array_ops, _AS_FLOATS, compiler.compile_call())
    return functools.partial(weighing.compare, TorchCriterion(function, compiler.compile(function)))


def find_unknown(loss: Any) -> Callable[[Any, Any], Any] | None:
    """Returns the loss as a function of (outputs, targets); None if it is known whether it is a sum or a mean."""
    function = _resolve(loss)
    known = loss is None or isinstance(loss, Objective) or _is_torchs(function) or _is_sum(function)
    return None if known else function


def find_traits(loss: Any) -> LossTraits:
    """Returns what named metrics need to know about the loss."""
    function, resolved = getattr(loss, "func", loss), _resolve(loss)
    probabilities = isinstance(loss, nn.BCELoss) or function is nn.functional.binary_cross_entropy
    binary = isinstance(loss, _BINARY) or any(function is each for each in _BINARY_FUNCTIONS)
    ignored = resolved.ignore_index if _is_of_classes(resolved) else None
    return LossTraits(ignored, axis=1, binary=binary or probabilities, threshold=0.5 if probabilities else 0.0)


class TorchCriterion(Criterion):
    """A loss that is a function of (outputs, targets), and what a mean of CrossEntropyLoss or NLLLoss divides by."""

    def __init__(self, function: Any, call: Any = None) -> None:
        super().__init__(function, call)
        self._is_of_classes = _is_of_classes(function)
        self._takes_reduction = _takes_reduction(function)
        self.is_own = self._is_of_classes or _is_torchs(function)

    @property
    def _class_weights(self) -> Tensor | None:
        """The loss's current class weights, read each time because the script may replace them.

        The lookup avoids `nn.Module`'s slow `__getattr__`.
        """
        if not self._is_of_classes:
            return None
        buffers = self.function._buffers
        weights: Tensor | None = buffers["weight"] if "weight" in buffers else self.function.weight  # noqa: SIM401
        return weights

    @property
    def is_sum(self) -> bool:
        """Whether the loss has reduction="sum"."""
        return _is_sum(self.function)

    def check(self, outputs: Any, targets: Any, examples: int) -> None:
        """Raises ModelError if there are not as many class weights as classes, before a label is looked up in them."""
        weights = self._class_weights
        if (
            weights is not None
            and isinstance(outputs, Tensor)
            and outputs.ndim > 1
            and len(weights) != outputs.shape[1]
        ):
            raise ModelError(
                f"Class weights need one entry per class. Got {len(weights)} weights for {outputs.shape[1]} classes. "
                "Give one weight for each of the model's outputs."
            )

    def find_labels(self, outputs: Any, targets: Any) -> Labels | None:
        """Returns the valid labels of a loss over classes if the targets are integers; else None."""
        if not (self._is_of_classes and _are_labels(targets)):
            return None
        has_classes = isinstance(outputs, Tensor) and outputs.ndim > 1
        return Labels(outputs.shape[1], self.function.ignore_index) if has_classes else None

    def refuses_labels(self, targets: Any) -> bool:
        """Returns whether torch itself raises for a label that is not a class, as it does on a CPU.

        Compiled code with several threads would end the process.
        """
        return isinstance(targets, Tensor) and targets.is_cpu and self.call is self.function

    def compute_each(self, outputs: Any, targets: Any) -> Any:
        """Returns the loss without its reduction; for reduction="batchmean" summed over each example's elements."""
        values = self._compute_with("none", outputs, targets)
        if getattr(self.function, "reduction", None) == "batchmean" and isinstance(values, Tensor) and values.ndim:
            return values.reshape(len(values), -1).sum(1)
        return values

    def _compute_with(self, reduction: str, outputs: Any, targets: Any) -> Any:
        """Returns the value of torch's own loss with this reduction, and of any other loss with its own reduction."""
        function = self.function
        if not self._takes_reduction:
            return self.call(outputs, targets)
        attributes = function.__dict__
        before = attributes["reduction"]
        attributes["reduction"] = reduction
        try:
            return self.call(outputs, targets)
        finally:
            attributes["reduction"] = before

    def count(self, targets: Any) -> Any:
        """Returns each label's weight in the loss's mean: 0 if it is ignored, else its class's weight (bools if all 1).

        None if the loss is not a mean over integer labels."""
        if not (self._is_of_classes and self.function.reduction == "mean" and _are_labels(targets)):
            return None
        counted = targets != self.function.ignore_index
        weights = self._class_weights
        if weights is None:
            return counted
        weights = weights.detach().double()
        return torch.where(counted, weights[torch.where(counted, targets, 0).long()], 0)

    def weigh(self, weighing: Weighing, outputs: Any, targets: Any, weights: Any, share: Share) -> Term:
        """Returns the shard's `Term`; for a mean over labels, the sum of the losses and the labels' weights.

        Labels that do not count add exactly 0 to the sum and to the gradient.
        """
        counted = None if weights is not None else self.count(targets)
        if counted is None:
            return super().weigh(weighing, outputs, targets, weights, share)
        weight = counted if counted.dtype is torch.bool else counted.sum()  # bools stand for their number
        if share.alone:
            value = self.call(outputs, targets)
            return Term(value, value, weight, is_mean=True)
        total = self._compute_with("sum", outputs, targets)
        return Term(total, total, weight, 1.0)

    def find_contributing(self, targets: Any, counted: Any) -> Any:
        """Returns a mask of the labels that have a loss: with label smoothing also those whose class has weight 0."""
        smoothed = getattr(self.function, "label_smoothing", 0.0) > 0
        return targets != self.function.ignore_index if smoothed else counted


def _resolve(loss: Any) -> Any:
    """Returns nn.CrossEntropyLoss or nn.NLLLoss for their functions in nn.functional, and any other loss as it is."""
    function, keywords = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    if function is nn.functional.cross_entropy:
        return nn.CrossEntropyLoss(**keywords)
    if function is nn.functional.nll_loss:
        return nn.NLLLoss(**keywords)
    return loss


def _is_torchs(function: Any) -> bool:
    """Returns whether a loss is defined in torch and not by the script."""
    own = getattr(type(function), "forward", function)
    own = own.func if isinstance(own, functools.partial) else own
    return (getattr(own, "__module__", None) or "").startswith(("torch.nn.modules.loss", "torch.nn.functional"))


def _are_labels(targets: Any) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point()


def _is_of_classes(function: Any) -> bool:
    """Returns whether this is CrossEntropyLoss or NLLLoss, or a subclass that does not override `forward`."""
    return getattr(type(function), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def _takes_reduction(function: Any) -> bool:
    """Returns whether this is torch's own loss with an attribute `reduction`."""
    own = type(function).__module__.startswith("torch.nn") or _is_of_classes(function)
    return own and hasattr(function, "reduction")


def _is_sum(function: Any) -> bool:
    """Returns whether the loss has reduction="sum"."""
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    return "sum" in (getattr(function, "reduction", None), keywords.get("reduction"))
