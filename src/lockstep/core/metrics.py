"""Computes loss and metrics from the shards' sums, which are added in a fixed order and divided once at the end.

The mean of the shards' means would be wrong if the shards have different sizes. So each shard returns sums, the tree
adds the sums of all shards, and the function `result` of a metric computes its value from the total.

The vector of sums of a shard, a step, an epoch or an evaluation is `[loss, weight, divided, metric sums ...]`, where
`divided` is the number of shards whose loss is a sum that still has to be divided by the weight.
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
    """Returns the first sum divided by the second, which is its weight; NaN if the weight is 0."""
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


@dataclass(frozen=True)
class Metric:
    """A custom metric that can be computed from sums over the examples.

    `sums(outputs, targets)` returns the sums over the examples of one shard. `result(sums)` returns the metric's value
    from the sums over all shards; by default it divides the first sum by the second. A metric that cannot be computed
    from sums (AUROC, a median) must be a metric object instead: any object with `update(outputs, targets)`, `compute()`
    and `reset()`.

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
        """Raises ModelError for invalid arguments; without a name, the metric gets the name of `sums`."""
        if not callable(self.sums) or not callable(self.result):
            raise ModelError(
                f"sums and result of a Metric must be functions. Got sums={self.sums!r} and result={self.result!r}. "
                "Write for example Metric(sums=f, result=g)."
            )
        if not isinstance(self.name, str):
            raise ModelError(f"A Metric's name must be a string. Got name={show(self.name)}. Use name='mine'.")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.sums, "__name__", "metric"))


def resolve(metrics: Sequence[Any] | Mapping[str, Any], named: Mapping[str, Callable[[Any, Any], Any]]) -> list[Metric]:
    """Returns every given metric as a `Metric`; each may be a name in `named`, a function or a `Metric`."""
    if not isinstance(metrics, Iterable):
        raise ModelError(f"metrics must be a list or a dict of metrics. Got {show(metrics)}. Use metrics=['accuracy'].")
    pairs = list(metrics.items()) if isinstance(metrics, Mapping) else [("", metric) for metric in metrics]
    result = []
    for name, metric in pairs:
        if isinstance(metric, str):
            if metric not in named:
                raise ModelError(
                    f"There is no metric named {metric!r}. Use one of {', '.join(sorted(named))}, a function of "
                    "(outputs, targets), or a lockstep.Metric."
                )
            result.append(Metric(named[metric], ratio, name or metric))
        elif isinstance(metric, Metric):
            result.append(Metric(metric.sums, metric.result, name or metric.name))
        elif callable(metric):
            result.append(Metric(metric, ratio, name or getattr(metric, "__name__", type(metric).__name__)))
        else:
            raise ModelError(
                f"A metric must be a name, a function or a lockstep.Metric. Got {metric!r}. Use for example 'accuracy'."
            )
    names = [metric.name for metric in result]
    if len(set(names)) < len(names) or "loss" in names:
        raise ModelError(
            f"Metric names must be unique, and none may be 'loss'. Got {names}. Rename a metric with "
            "metrics={'name': metric, ...}."
        )
    return result


def divisor(sums: Sums) -> float:
    """Returns the number by which the summed gradient is divided: the weight if the losses were sums, otherwise 1."""
    return float(sums[WEIGHT]) if sums[DIVIDED] else 1.0


def loss(sums: Sums) -> float:
    """Returns the loss of the batch: the summed loss divided by its weight, or undivided if the loss is a sum."""
    return ratio(sums[[LOSS, WEIGHT]]) if sums[WEIGHT] or sums[DIVIDED] else float(sums[LOSS])


@dataclass(frozen=True)
class Column:
    """The name of a metric, the number of its sums in the vector, and the function from these sums to its value."""

    name: str
    width: int
    result: Callable[[Sums], float] = field(default=ratio)


def results(sums: Sums, columns: Sequence[Column]) -> dict[str, float]:
    """Returns the values of loss and metrics by name.

    >>> results(np.array([6.0, 4.0, 0.0, 3.0, 4.0]), [Column("accuracy", 2)])
    {'loss': 1.5, 'accuracy': 0.75}
    """
    values = {"loss": loss(sums)}
    start = FIRST_METRIC
    for column in columns:
        values[column.name] = float(column.result(sums[start : start + column.width]))
        start += column.width
    return values
