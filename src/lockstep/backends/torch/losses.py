"""Losses: what a shard's loss weighs, so that the shards add up to the batch's own loss.

A mean over the shard's examples is multiplied by (its examples / the batch's)
before the backward pass; the shards then simply add. A loss that divides by
something else (targets that are not ignored, class weights, example weights) is
summed instead and divided once after the tree. With one shard neither happens:
the loss is the user's own, to the bit.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.backends.torch.inputs import call
from lockstep.core.batches import describe
from lockstep.core.objective import Objective, Sum, read_sum
from lockstep.core.weights import explain_missing_input, split_batch
from lockstep.errors import BatchError, ModelError

SHORT = (torch.float16, torch.bfloat16)  # shorter than what leaves are added in


class Share(NamedTuple):
    """A shard's part of the batch: its examples, the batch's, and whether it is all there is."""

    examples: int
    total: int
    alone: bool
    summed: bool = False  # whether a loss that does not say so itself is a sum


@dataclass(frozen=True)
class Term:
    """The loss of one shard: where the backward pass starts, and what the sums get."""

    root: Tensor | None  # None: this shard weighs nothing and has no gradient
    loss: Any
    weight: Any
    divided: bool = False
    outputs: Any = None
    targets: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)  # an objective's own metrics
    share: float = 1.0  # by what the gradient is still to be multiplied
    reading: str = ""  # how a model's own loss was read, which must be one way in all shards


def of(loss: Any) -> Callable[[nn.Module, Any, Share], Term]:
    """The function (model, shard's batch, share) -> Term for what the user gave as loss, but None."""
    if isinstance(loss, Objective):
        return functools.partial(_objective, loss)
    criterion = _criterion(loss)
    if not callable(criterion):
        raise ModelError(
            f"A loss is a torch.nn loss, a function of (outputs, targets) or a lockstep.objective. Got {loss!r}."
        )
    return functools.partial(_compared, criterion)


def criterion_of(loss: Any) -> Callable[[Any, Any], Any] | None:
    """The loss as a function of (outputs, targets), if it does not say itself how it reduces them."""
    criterion = _criterion(loss)
    own = getattr(type(criterion), "forward", criterion)
    own = own.func if isinstance(own, functools.partial) else own
    said = (getattr(own, "__module__", None) or "").startswith(("torch.nn.modules.loss", "torch.nn.functional"))
    return None if loss is None or isinstance(loss, Objective) or said or _is_sum(criterion) else criterion


def ignored(loss: Any) -> int | None:
    """The target that the loss leaves out, if it has one."""
    criterion = _criterion(loss)
    return criterion.ignore_index if _of_classes(criterion) else None


def _criterion(loss: Any) -> Any:
    """The loss with torch's functional forms turned into the modules that say how they divide."""
    function, keywords = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    if function is nn.functional.cross_entropy:
        return nn.CrossEntropyLoss(**keywords)
    if function is nn.functional.nll_loss:
        return nn.NLLLoss(**keywords)
    return loss


def mean(value: Tensor, share: Share, **rest: Any) -> Term:
    """A mean over the shard's examples.

    A loss in a shorter type than leaves are added in would round its share, so there the gradient is multiplied by it.
    """
    part = 1.0 if share.alone else share.examples / share.total
    loss = value.detach().double() * share.examples
    if share.alone or value.dtype in SHORT:
        return Term(value, loss, share.examples, share=part, **rest)
    return Term(value * part, loss, share.examples, **rest)


def _pair(value: Tensor, weight: Any, share: Share, contributes: Tensor | None = None, **rest: Any) -> Term:
    """A sum over the shard and what it is to be divided by; `contributes` tells what of the shard can be in the sum.

    A shard is left out only where its sum is 0 by construction: weights of both signs may cancel, and label smoothing
    gives a loss to targets whose class weighs 0. A batch whose weights sum to 0 is refused.
    """
    if share.alone:
        counts = float(weight) != 0
    elif contributes is not None:
        counts = bool(contributes.any())
    else:  # an objective's: 0 / 0 in a shard without anything to count is no loss
        total = float(value.detach())
        counts = float(weight) != 0 or (math.isfinite(total) and total != 0)
    if not counts:
        return Term(None, 0.0, 0.0, True, **rest)
    if share.alone:
        return Term(value / weight, value.detach(), weight, **rest)
    return Term(value, value.detach(), weight, True, **rest)


def _sum(loss: Sum, share: Share, **rest: Any) -> Term:
    """A sum, which is divided only if it has a count."""
    if loss.count is None:
        return Term(loss.total, loss.total.detach(), 0.0, **rest)
    return _pair(loss.total, loss.count, share, **rest)


def _objective(objective: Objective, model: nn.Module, batch: Any, share: Share) -> Term:
    """What the user's own function says: a mean, a sum, or one of them with metrics."""
    loss, values = objective.compute(model, batch)
    if isinstance(loss, Sum):
        return _sum(loss, share, values=values)
    if not isinstance(loss, Tensor) or (loss.ndim and len(loss) != share.examples):
        raise ModelError(
            "An objective returns the shard's mean loss as a tensor, one loss per example, "
            "lockstep.Sum(total, count), or (one of these, {name: value}). "
            f"Got {describe(loss)} for a shard of {share.examples}."
        )
    return mean(loss.mean() if loss.ndim else loss, share, values=values)


def _compared(criterion: Any, model: nn.Module, batch: Any, share: Share) -> Term:
    """A loss of (outputs, targets), with example weights where the batch has them."""
    inputs, targets, weights = split_batch(batch, "weights.float()")
    with explain_missing_input(batch):
        outputs = call(model, inputs)
    rest = {"outputs": outputs, "targets": targets}
    _check_classes(criterion, outputs)
    try:
        _check_labels(criterion, outputs, targets)
        if weights is not None:
            return _weighted(criterion, outputs, targets, weights, share, rest)
        if share.summed or _is_sum(criterion):
            value = criterion(outputs, targets)
            return Term(value, value.detach(), 0.0, **rest)
        if _counts_targets(criterion, targets):
            counted = _target_weights(criterion, targets)
            weight = counted.sum()
            if share.alone and float(weight):
                value = criterion(outputs, targets)
                return Term(value, value.detach().double() * weight, weight, **rest)
            total = _reduced(criterion, "sum")(outputs, targets)
            return _pair(total, weight, share, _contributing(criterion, targets, counted), **rest)
        value = read_sum(criterion(outputs, targets))
    except IndexError as error:
        if _of_classes(criterion):
            raise _labels(error, outputs, targets) from error
        raise
    if isinstance(value, Sum):
        return _sum(value, share, **rest)
    if not isinstance(value, Tensor) or (value.ndim and len(value) != share.examples):
        raise ModelError(
            "A loss gives one number, one per example, or lockstep.Sum(total, count). "
            f"Got {describe(value)} for a shard of {share.examples}."
        )
    return mean(value.mean() if value.ndim else value, share, **rest)


def _weighted(criterion: Any, outputs: Any, targets: Any, weights: Any, share: Share, rest: Mapping[str, Any]) -> Term:
    """The mean with a weight for each example: the weighted sum over the sum of the weights."""
    if isinstance(weights, list) and all(isinstance(weight, int | float) for weight in weights):
        weights = torch.tensor(weights, dtype=torch.float64, device=getattr(outputs, "device", None))
    shape = tuple(getattr(weights, "shape", ()))
    if not shape or weights.numel() != share.examples:
        raise BatchError(
            f"There is one weight per example. Got weights of shape {shape} for a shard of "
            f"{share.examples}. Give one number for each example."
        )
    values = _reduced(criterion, "none")(outputs, targets)
    if not isinstance(values, Tensor) or not values.ndim or len(values) != share.examples:
        raise ModelError(
            f"Example weights need a loss that gives one value per example. Got {describe(values)} for a shard of "
            f"{share.examples}. Return one value per example, or write an objective that returns "
            "lockstep.Sum(total, count)."
        )
    exact_weights = weights.double().reshape(-1)
    weights = exact_weights.to(values.dtype)
    spread = weights.reshape(-1, *[1] * (values.ndim - 1))  # (examples, 1, ...)
    total = (values * spread).sum()
    if getattr(criterion, "reduction", None) == "sum":
        return Term(total, total.detach(), 0.0, **rest)
    if _counts_targets(criterion, targets):
        counted = _target_weights(criterion, targets) * spread.double()
        contributes = _contributing(criterion, targets, counted) & (spread != 0)
    else:
        rows = values.reshape(len(values), -1)
        of_sums = getattr(criterion, "reduction", None) == "batchmean"
        total = ((rows.sum(1) if of_sums else rows.mean(1)) * weights).sum()
        counted = contributes = exact_weights
    return _pair(total, counted.sum().detach(), share, contributes, **rest)


def _counts_targets(criterion: Any, targets: Any) -> bool:
    """Whether the loss's mean divides by the targets it counts: class indices, some ignored, some heavier."""
    return (
        _of_classes(criterion)
        and criterion.reduction == "mean"
        and isinstance(targets, Tensor)
        and not targets.is_floating_point()
    )


def _of_classes(criterion: Any) -> bool:
    """Whether this is torch's own loss over classes; a subclass with a forward of its own is a loss we do not know."""
    return getattr(type(criterion), "forward", None) in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def _target_weights(criterion: Any, targets: Tensor) -> Tensor:
    """What each target weighs: 0 where ignored, else its class's weight."""
    counted: Tensor = targets != criterion.ignore_index
    if criterion.weight is None:
        return counted.double()
    weights: Tensor = criterion.weight.double()
    return torch.where(counted, weights[torch.where(counted, targets, 0).long()], 0)


def _contributing(criterion: Any, targets: Tensor, weights: Tensor) -> Tensor:
    """Which targets have a loss: with label smoothing also those whose own class weighs 0."""
    smoothed = getattr(criterion, "label_smoothing", 0.0) > 0
    return targets != criterion.ignore_index if smoothed else weights != 0


def _reduced(criterion: Any, reduction: str) -> Any:
    """torch's own loss with another reduction; a loss of the user's as it is."""
    own = type(criterion).__module__.startswith("torch.nn") or _of_classes(criterion)
    if not own or not hasattr(criterion, "reduction"):
        return criterion
    criterion = copy.copy(criterion)
    criterion.reduction = reduction
    return criterion


def _is_sum(criterion: Any) -> bool:
    """Whether the loss says that it is a sum."""
    return getattr(criterion, "reduction", None) == "sum" or _keyword(criterion, "reduction") == "sum"


def _keyword(function: Any, name: str) -> Any:
    return function.keywords.get(name) if isinstance(function, functools.partial) else None


def _check_classes(criterion: Any, outputs: Any) -> None:
    """Refuses class weights of another number, before a label is looked up in them."""
    weights = criterion.weight if _of_classes(criterion) else None
    if weights is not None and isinstance(outputs, Tensor) and outputs.ndim > 1 and len(weights) != outputs.shape[1]:
        raise ModelError(
            f"Class weights are one for each class. Got {len(weights)} for {outputs.shape[1]} classes. "
            "Give one for each of the model's outputs."
        )


def _check_labels(criterion: Any, outputs: Any, targets: Any) -> None:
    """Raises what the CPU's kernel raises; a GPU's would end the process's context instead."""
    if _of_classes(criterion) and isinstance(targets, Tensor) and targets.is_cuda and not targets.is_floating_point():
        counted = targets[targets != criterion.ignore_index]
        if bool(((counted < 0) | (counted >= outputs.shape[1])).any()):
            raise IndexError("a target is out of bounds")


def _labels(error: IndexError, outputs: Any, targets: Any) -> Exception:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim < 2:
        return error
    classes = outputs.shape[1]
    return BatchError(
        f"Labels run from 0 to {classes - 1}, for the model gives {classes} outputs. "
        f"Got labels from {targets.min().item()} to {targets.max().item()}. Mend the labels, or the last layer."
    )
