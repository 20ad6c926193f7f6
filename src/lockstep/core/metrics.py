"""Metrics: sums that go through the tree, and the one division after it.

A mean of means is wrong when shards are uneven. So a shard never gives a mean:
it gives sums, the tree adds them, and `result` divides once.

The vector of sums of a shard, a step, an epoch or a whole evaluation is
`[loss, weight, divided, metric sums ...]`; `divided` counts the shards whose loss
was summed and still has to be divided by the weight.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.arguments import show
from lockstep.errors import ModelError

LOSS, WEIGHT, DIVIDED, FIRST_METRIC = 0, 1, 2, 3

Sums = NDArray[np.float64]


def ratio(sums: Sums) -> float:
    """The mean that a pair (sum, weight) stands for."""
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


@dataclass(frozen=True)
class Metric:
    """A metric of your own, as sums and what to make of them in the end.

    `sums(outputs, targets)` gives the sums of one shard, `result(sums)` the value
    once all are added. What is no function of such sums (AUROC, a median) is a metric
    object: anything with `update(outputs, targets)`, `compute()` and `reset()`.

    >>> def squares(outputs, targets):
    ...     return ((outputs - targets) ** 2).sum(), len(targets)
    >>> rmse = Metric(sums=squares, result=lambda sums: (sums[0] / sums[1]) ** 0.5, name="rmse")
    >>> float(rmse.result(np.array([18.0, 2.0])))
    3.0
    """

    sums: Callable[[Any, Any], Any]
    result: Callable[[Sums], float] = field(default=ratio)
    name: str = ""

    def __post_init__(self) -> None:
        """Takes the function's name where none was given."""
        if not callable(self.sums) or not callable(self.result):
            raise ModelError(
                f"A Metric is made of two functions. Got sums={self.sums!r}, result={self.result!r}. "
                "Use Metric(sums=f, result=g)."
            )
        if not isinstance(self.name, str):
            raise ModelError(f"A Metric's name is a string. Got name={show(self.name)}. Use name='mine'.")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.sums, "__name__", "metric"))


def resolve(metrics: Sequence[Any] | Mapping[str, Any], named: Mapping[str, Callable[[Any, Any], Any]]) -> list[Metric]:
    """The metrics that were asked for, by name, as functions or as `Metric`; `named` are the backend's own."""
    if not isinstance(metrics, Iterable):
        raise ModelError(f"metrics is a list or a dict of metrics. Got {show(metrics)}. Use metrics=['accuracy'].")
    pairs = list(metrics.items()) if isinstance(metrics, Mapping) else [("", metric) for metric in metrics]
    result = []
    for name, metric in pairs:
        if isinstance(metric, str):
            if metric not in named:
                raise ModelError(
                    f"A metric's name is one of {', '.join(sorted(named))}. Got {metric!r}. "
                    "Use one of these, a function of (outputs, targets), or lockstep.Metric."
                )
            result.append(Metric(named[metric], ratio, name or metric))
        elif isinstance(metric, Metric):
            result.append(Metric(metric.sums, metric.result, name or metric.name))
        elif callable(metric):
            result.append(Metric(metric, ratio, name or getattr(metric, "__name__", type(metric).__name__)))
        else:
            raise ModelError(f"A metric is a name, a function or a lockstep.Metric. Got {metric!r}. Use 'accuracy'.")
    names = [metric.name for metric in result]
    if len(set(names)) < len(names) or "loss" in names:
        raise ModelError(f"Metrics need names of their own. Got {names}. Use metrics={{'name': metric, ...}}.")
    return result


def divisor(sums: Sums) -> float:
    """By what the summed gradient is divided: the weight where losses were summed, else 1."""
    return float(sums[WEIGHT]) if sums[DIVIDED] else 1.0


def loss(sums: Sums) -> float:
    """The loss: the mean over its weight, or the plain sum where the loss is one."""
    return ratio(sums[[LOSS, WEIGHT]]) if sums[WEIGHT] or sums[DIVIDED] else float(sums[LOSS])


@dataclass(frozen=True)
class Column:
    """Where the sums of one metric lie in the vector, and what becomes of them."""

    name: str
    width: int
    result: Callable[[Sums], float] = field(default=ratio)


def results(sums: Sums, columns: Sequence[Column]) -> dict[str, float]:
    """The values that the sums stand for, by name.

    >>> results(np.array([6.0, 4.0, 0.0, 3.0, 4.0]), [Column("accuracy", 2)])
    {'loss': 1.5, 'accuracy': 0.75}
    """
    values = {"loss": loss(sums)}
    start = FIRST_METRIC
    for column in columns:
        values[column.name] = float(column.result(sums[start : start + column.width]))
        start += column.width
    return values
