"""Keras metrics, whose variables are added over the shards together with the loss.

A shard updates a metric's variables from zero, the tree adds them, and the metric's own `result` computes its value
from the totals. So the value is the metric of the whole batch, also if the shards differ in size. A metric whose state
is not a sum, e.g. a maximum, is refused.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import keras
import numpy as np
from keras import ops

from lockstep.core.metrics import Column, Sums
from lockstep.errors import ModelError

UNKNOWN_ROOM = 4096  # how many sums are reserved for a metric whose shape depends on the data


def find_room(model: Any) -> int:
    """Returns the largest number of sums that the model's metrics and the losses of its outputs can give."""
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    metrics = [each for part in given for each in keras.tree.flatten(part) if each is not None]
    num_outputs = len(getattr(model, "output_names", None) or [None])
    # Keras may copy a metric for every output. The loss of an output is a mean, which has two variables.
    return 2 * num_outputs + sum(_find_metric_room(each) for each in metrics) * num_outputs


def _find_metric_room(metric: Any) -> int:
    """Returns the largest number of sums that one metric can give."""
    if not isinstance(metric, keras.metrics.Metric):  # Keras averages a function's values: total and count
        return 2
    if not getattr(metric, "_built", True):
        return UNKNOWN_ROOM
    return sum(prod(variable.shape) for variable in metric.variables) or UNKNOWN_ROOM


class CompiledMetrics:
    """The metrics of a compiled model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.are_built = False

    @property
    def _metrics(self) -> list[tuple[str, Any]]:
        """The losses of several outputs, then every metric, with the names that Keras gives them."""
        loss, metrics = self._model._compile_loss, self._model._compile_metrics
        named = [(each.name, each) for each in (loss.metrics if loss is not None else ())]
        names = list(metrics.result()) if metrics is not None and metrics.built else []
        return named + list(zip(names, metrics.metrics if names else [], strict=True))

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [variable for _, metric in self._metrics for variable in metric.variables]

    def update(self, targets: Any, outputs: Any, weights: Any) -> None:
        """Updates the metrics with one shard's examples; called in a scope in which their variables are 0."""
        if self._model._compile_metrics is not None:
            self._model._compile_metrics.update_state(targets, outputs, weights)

    def list_columns(self) -> list[Column]:
        """Returns each metric's name, its number of sums, and the function that computes its value from these sums."""
        return [
            Column(name, sum(prod(variable.shape) for variable in metric.variables), _ComputeResult(name, metric))
            for name, metric in self._metrics
        ]

    def build(self, targets: Any, outputs: Any, weights: Any) -> None:
        """Lets Keras build losses and metrics from a few examples; raises ModelError if a metric is not a sum."""
        loss, metrics = self._model._compile_loss, self._model._compile_metrics
        if loss is not None and not loss.built:
            loss.build(targets, outputs)
        if metrics is not None:
            if not metrics.built:
                metrics.build(targets, outputs)
            for (name, metric), once, twice in zip(*self._probe(targets, outputs, weights), strict=True):
                _check_is_sum(name, metric, once, twice)
        self.are_built = True

    def _probe(self, targets: Any, outputs: Any, weights: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the metrics, and their states after one and after two updates with the same examples."""
        compiled = self._model._compile_metrics
        before = [ops.zeros(variable.shape, variable.dtype) for variable in compiled.variables]
        once = compiled.stateless_update_state(before, targets, outputs, weights)
        twice = compiled.stateless_update_state(once, targets, outputs, weights)
        named = self._metrics[-len(compiled.metrics) :] if compiled.metrics else []
        return named, _split_values(compiled.metrics, once), _split_values(compiled.metrics, twice)


class _ComputeResult:
    """Computes a metric's value from its summed variables."""

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._metric = metric

    def __call__(self, sums: Sums) -> float:
        """Returns the metric's value; raises ModelError if it is not one number."""
        values = []
        start = 0
        for variable in self._metric.variables:
            stop = start + prod(variable.shape)
            values.append(ops.convert_to_tensor(sums[start:stop].reshape(variable.shape), variable.dtype))
            start = stop
        result = np.asarray(ops.convert_to_numpy(self._metric.stateless_result(values)))
        if result.ndim:
            raise ModelError(
                f"The metric {self._name!r} returned an array of shape {result.shape}, but a metric must return one "
                "number. Use an average, e.g. average='macro'."
            )
        return float(result)


def _split_values(metrics: Sequence[Any], values: Sequence[Any]) -> list[list[Any]]:
    """Returns the values of each metric's variables, on the host."""
    given = iter(values)
    return [[np.asarray(ops.convert_to_numpy(next(given))) for _ in metric.variables] for metric in metrics]


def _check_is_sum(name: str, metric: Any, once: Sequence[Any], twice: Sequence[Any]) -> None:
    """Raises ModelError if updating the metric twice with the same examples does not double its state.

    The state of a metric that is a sum over the examples is doubled.
    """
    for one, two in zip(once, twice, strict=True):
        if not np.allclose(two, 2 * one, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ModelError(
                f"The metric {name!r} ({type(metric).__name__}) is not supported: its state must be a sum over the "
                "examples, because the shards' states are added, but the same examples twice do not double the state. "
                "Leave the metric out, or compute it from trainer.predict."
            )
