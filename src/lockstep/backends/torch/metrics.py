"""Metrics by name, as (sum, weight) over a shard."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch import losses
from lockstep.core.metrics import Column, Metric, ratio
from lockstep.core.target_kind import Match, match
from lockstep.errors import ModelError

Pair = tuple[Any, Any]
_OF_FLAGS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_FUNCTIONS_OF_FLAGS = (nn.functional.binary_cross_entropy_with_logits, nn.functional.multilabel_soft_margin_loss)


def named(loss: Any) -> Mapping[str, Callable[[Any, Any], Pair]]:
    """The metrics that go by a name; targets that the loss ignores do not count, and logits are told from odds."""
    ignored = losses.ignored(loss)
    function = getattr(loss, "func", loss)
    odds = isinstance(loss, nn.BCELoss) or function is nn.functional.binary_cross_entropy
    flags = odds or isinstance(loss, _OF_FLAGS) or any(function is each for each in _FUNCTIONS_OF_FLAGS)
    threshold = 0.5 if odds else 0.0

    def accuracy(outputs: Tensor, targets: Tensor) -> Pair:
        found = match("accuracy", outputs.shape, targets.shape, axis=1, flags=flags)
        if found is Match.FLAGS:
            hits = (outputs.reshape(targets.shape) > threshold) == (targets > 0.5)
            return hits.sum(), hits.numel()
        targets = targets.argmax(1) if found is Match.ODDS else targets
        return _counted(outputs.argmax(1) == targets, targets)

    def top5(outputs: Tensor, targets: Tensor) -> Pair:
        found = match("top5", outputs.shape, targets.shape, axis=1)
        targets = targets.argmax(1) if found is Match.ODDS else targets
        best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        return _counted((best == targets.unsqueeze(1)).any(1), targets)

    def mse(outputs: Tensor, targets: Tensor) -> Pair:
        errors = _errors(outputs, targets)
        return errors.square().sum(), errors.numel()

    def mae(outputs: Tensor, targets: Tensor) -> Pair:
        errors = _errors(outputs, targets)
        return errors.abs().sum(), errors.numel()

    def _counted(hits: Tensor, targets: Tensor) -> Pair:
        counted = torch.ones_like(hits) if ignored is None else targets != ignored
        return (hits & counted).sum(), counted.sum()

    return {"accuracy": accuracy, "top5": top5, "mse": mse, "mae": mae}


def measure(metric: Metric, outputs: Any, targets: Any, examples: int) -> tuple[list[Any], Column]:
    """The sums of a metric over one shard, and the column they fill."""
    value = metric.sums(outputs, targets)
    if metric.result is ratio:
        return pair(metric.name, value, examples), Column(metric.name, 2)
    sums = list(torch.as_tensor(value).flatten()) if not isinstance(value, tuple | list) else list(value)
    return sums, Column(metric.name, len(sums), metric.result)


def pair(name: str, value: Any, examples: int) -> list[Any]:
    """(sum, weight) out of a pair, one value per example, or the mean over the shard."""
    if isinstance(value, tuple) and len(value) == 2:
        return list(value)
    value = torch.as_tensor(value)
    if value.ndim == 0:
        return [value.double() * examples, examples]
    if len(value) != examples:
        raise ModelError(
            f"A metric gives one value per example, or (sum, weight). Got shape {tuple(value.shape)} from {name!r} "
            f"for a shard of {examples}. Return one of these."
        )
    return [value.double().reshape(examples, -1).mean(1).sum(), examples]


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:
        raise ModelError(
            "mse and mae compare outputs and targets of one shape. "
            f"Got {tuple(outputs.shape)} and {tuple(targets.shape)}. Reshape one of them."
        )
    return outputs.double() - targets.double()
