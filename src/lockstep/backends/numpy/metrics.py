"""Metrics by name, as (sum, weight) over a shard."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.backends.numpy.network import CrossEntropy, Floats, SquaredError
from lockstep.core.target_kind import Match, match


def named(loss: CrossEntropy | SquaredError) -> dict[str, Callable[[Floats, Floats], Any]]:
    """The metrics that go by a name; targets that the loss ignores do not count."""

    def labels(metric: str, outputs: Floats, targets: Floats) -> Floats:
        return targets.argmax(1) if match(metric, outputs.shape, targets.shape) is Match.ODDS else targets

    def accuracy(outputs: Floats, targets: Floats) -> tuple[float, float]:
        targets = labels("accuracy", outputs, targets)
        return counted(outputs.argmax(1) == targets, targets)

    def top5(outputs: Floats, targets: Floats) -> tuple[float, float]:
        targets = labels("top5", outputs, targets)
        return counted((np.argsort(-outputs, 1)[:, :5] == targets[:, None]).any(1), targets)

    def counted(hits: Floats, targets: Floats) -> tuple[float, float]:
        there = targets != getattr(loss, "ignore_index", None)
        return float((hits & there).sum()), float(there.sum())

    return {
        "accuracy": accuracy,
        "top5": top5,
        "mse": lambda outputs, targets: ((outputs - targets) ** 2).mean(1),
        "mae": lambda outputs, targets: np.abs(outputs - targets).mean(1),
    }


def pair(value: Any, examples: int) -> list[float]:
    """A metric's sum and weight; values for every example weigh one each."""
    if isinstance(value, tuple):
        return [float(value[0]), float(value[1])]
    return [float(np.sum(value)), float(examples)]
