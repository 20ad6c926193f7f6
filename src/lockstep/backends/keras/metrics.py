"""Metrics: Keras's own, whose variables are sums and go through the tree as columns.

A shard updates a metric's variables from zero, the tree adds them, and the metric's own
`result` makes a number of the totals. So a metric means over uneven shards what it means
over the whole batch. One whose state is no sum (a maximum, say) is refused by name.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import keras
import numpy as np
from keras import ops

from lockstep.core.metrics import Column, Sums
from lockstep.errors import ModelError

UNKNOWN = 4096  # room for the sums of a metric that takes its shape from the data


def room(model: Any) -> int:
    """The most sums that the model's metrics and the losses of its outputs give."""
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    found = [each for part in given for each in keras.tree.flatten(part) if each is not None]
    outputs = len(getattr(model, "output_names", None) or [None])
    return 2 * outputs + sum(_room(each) for each in found) * outputs  # Keras may copy one metric for every output


def _room(metric: Any) -> int:
    if not isinstance(metric, keras.metrics.Metric):
        return 2
    if not getattr(metric, "_built", True):
        return UNKNOWN
    return sum(prod(variable.shape) for variable in metric.variables) or UNKNOWN


class Measures:
    """The metrics of a compiled model, once Keras has built them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.checked = False

    @property
    def _metrics(self) -> list[tuple[str, Any]]:
        """The losses of several outputs, then every metric, under the names that Keras gives them."""
        loss, metrics = self._model._compile_loss, self._model._compile_metrics
        found = [(each.name, each) for each in (loss.metrics if loss is not None else ())]
        names = list(metrics.result()) if metrics is not None and metrics.built else []
        return found + list(zip(names, metrics.metrics if names else [], strict=True))

    @property
    def variables(self) -> list[Any]:
        """All of their variables."""
        return [variable for _, metric in self._metrics for variable in metric.variables]

    def update(self, targets: Any, outputs: Any, weights: Any) -> None:
        """Adds one shard, inside a scope in which the variables are 0."""
        if self._model._compile_metrics is not None:
            self._model._compile_metrics.update_state(targets, outputs, weights)

    def columns(self) -> list[Column]:
        """Where each metric's sums lie, and Keras's own way to make a number of them."""
        return [
            Column(name, sum(prod(variable.shape) for variable in metric.variables), _Result(name, metric))
            for name, metric in self._metrics
        ]

    def build(self, targets: Any, outputs: Any, weights: Any) -> None:
        """Lets Keras build losses and metrics from a few examples, and refuses those that are no sums."""
        loss, metrics = self._model._compile_loss, self._model._compile_metrics
        if loss is not None and not loss.built:
            loss.build(targets, outputs)
        if metrics is not None:
            if not metrics.built:
                metrics.build(targets, outputs)
            for (name, metric), once, twice in zip(*self._probed(targets, outputs, weights), strict=True):
                _check(name, metric, once, twice)
        self.checked = True

    def _probed(self, targets: Any, outputs: Any, weights: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Every metric with its state after the examples came once and twice."""
        compiled = self._model._compile_metrics
        before = [ops.zeros(variable.shape, variable.dtype) for variable in compiled.variables]
        once = compiled.stateless_update_state(before, targets, outputs, weights)
        twice = compiled.stateless_update_state(once, targets, outputs, weights)
        named = self._metrics[-len(compiled.metrics) :] if compiled.metrics else []
        return named, _apart(compiled.metrics, once), _apart(compiled.metrics, twice)


class _Result:
    """A metric's value out of its summed variables."""

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._metric = metric

    def __call__(self, sums: Sums) -> float:
        values = []
        start = 0
        for variable in self._metric.variables:
            stop = start + prod(variable.shape)
            values.append(ops.convert_to_tensor(sums[start:stop].reshape(variable.shape), variable.dtype))
            start = stop
        result = np.asarray(ops.convert_to_numpy(self._metric.stateless_result(values)))
        if result.ndim:
            raise ModelError(
                f"A metric gives one number. Got shape {result.shape} from {self._name!r}. "
                "Choose an average, such as average='macro'."
            )
        return float(result)


def _apart(metrics: Sequence[Any], values: Sequence[Any]) -> list[list[Any]]:
    """The values of each metric's own variables, on the host."""
    given = iter(values)
    return [[np.asarray(ops.convert_to_numpy(next(given))) for _ in metric.variables] for metric in metrics]


def _check(name: str, metric: Any, once: Sequence[Any], twice: Sequence[Any]) -> None:
    for one, two in zip(once, twice, strict=True):
        if not np.allclose(two, 2 * one, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ModelError(
                f"A metric's state is a sum over the examples, for sums go through the tree. Got {name!r} "
                f"({type(metric).__name__}), whose state after the same examples twice is not twice as large. "
                "Leave it out, or compute it from trainer.predict."
            )
