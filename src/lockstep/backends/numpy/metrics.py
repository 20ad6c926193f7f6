"""Metrics by name, as (sum, weight) over a shard."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.backends.numpy.network import CrossEntropy, Floats, SquaredError


def named(loss: CrossEntropy | SquaredError) -> dict[str, Callable[[Floats, Floats], Any]]:
    """The metrics that go by a name; targets that the loss ignores do not count."""

    def counted(hits: Floats, targets: Floats) -> tuple[float, float]:
        there = targets != getattr(loss, "ignore_index", None)
        return float((hits & there).sum()), float(there.sum())

    return {
        "accuracy": lambda outputs, targets: counted(outputs.argmax(1) == targets, targets),
        "top5": lambda outputs, targets: counted((np.argsort(-outputs, 1)[:, :5] == targets[:, None]).any(1), targets),
        "mse": lambda outputs, targets: ((outputs - targets) ** 2).mean(1),
        "mae": lambda outputs, targets: np.abs(outputs - targets).mean(1),
    }


def pair(value: Any, examples: int) -> list[float]:
    """A metric's sum and weight; values for every example weigh one each."""
    if isinstance(value, tuple):
        return [float(value[0]), float(value[1])]
    return [float(np.sum(value)), float(examples)]
