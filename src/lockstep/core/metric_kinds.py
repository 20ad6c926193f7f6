"""Separates metric objects, which have a state of their own, from the other metrics given to `wrap`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.metrics import Metric
from lockstep.errors import ModelError

METHODS = ("update", "compute", "reset")
_KERAS = ("update_state", "result", "reset_state")
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")
WAY_OUT = (
    "Wrap the metric in an object with update(outputs, targets), compute() and reset() that passes the right arguments "
    "to the metric; other values of each example can be part of the targets."
)

Named = tuple[str, bool, Any]  # a metric's name, whether the script gave this name, and the metric object


def is_metric_object(metric: Any) -> bool:
    """Returns whether `metric` has `update`, `compute` and `reset`; raises if it has only some of these methods.

    >>> is_metric_object(len), is_metric_object("accuracy")
    (False, False)
    """
    if isinstance(metric, str | Mapping | set | Metric):
        return False
    name = _describe_kind(metric)
    there = [method for method in METHODS if callable(getattr(metric, method, None))]
    if len(there) == len(METHODS) and isinstance(metric, type):
        raise ModelError(f"metrics contains the class {name}, not an instance of it. Write {name}(...).")
    if len(there) == len(METHODS):
        return True
    if all(callable(getattr(metric, method, None)) for method in _KERAS):
        raise ModelError(
            f"{name} of keras.metrics can only be used with a Keras model, and this model is not one. Give an object "
            f"whose update(outputs, targets), compute() and reset() call the update_state(targets, outputs), result() "
            f"and reset_state() of the {name}."
        )
    if there:
        missing = [method for method in METHODS if method not in there]
        raise ModelError(
            f"The metric object {name} has {' and '.join(there)}, but not {' and '.join(missing)}. A metric object "
            f"needs update(outputs, targets), compute() and reset(). Add {' and '.join(missing)}, or give a function "
            "of (outputs, targets) or a lockstep.Metric."
        )
    return False


def split(metrics: Any) -> tuple[list[Named], Any]:
    """Splits the metrics given to `wrap` into metric objects and other metrics; returns these in a list or a dict."""
    if not isinstance(metrics, type) and is_metric_object(metrics):
        metrics = [metrics]
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        return [], metrics
    pairs = list(metrics.items()) if isinstance(metrics, Mapping) else [("", metric) for metric in metrics]
    flags = [is_metric_object(metric) for _, metric in pairs]
    if not any(flags):
        return [], metrics
    objects = [
        (name or type(metric).__name__, bool(name), metric)
        for (name, metric), flag in zip(pairs, flags, strict=True)
        if flag
    ]
    rest = [pair for pair, flag in zip(pairs, flags, strict=True) if not flag]
    for name, _, metric in objects:
        _check_update(name, metric)
    others = [name or (metric if isinstance(metric, str) else getattr(metric, "name", "")) for name, metric in rest]
    check_names([*others, *(name for name, _, _ in objects)])
    return objects, dict(rest) if isinstance(metrics, Mapping) else [metric for _, metric in rest]


def check_names(names: Sequence[str]) -> None:
    """Raises ModelError if two metrics have the same name, or a metric is named `loss`."""
    given = [name for name in names if name]
    if len(set(given)) < len(given) or "loss" in given:
        raise ModelError(
            f"Metric names must be unique, and none may be 'loss'. Got {given}. Rename a metric with "
            f"metrics={{'name': metric, ...}}."
        )


def merge(values: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Returns the values of loss and metrics, then those of the metric objects; raises if a name is in both."""
    if values.keys() & more.keys():
        raise ModelError(
            "Metric names must be unique, but a metric object and another metric both have the name "
            f"{', '.join(sorted(values.keys() & more.keys()))}. Rename one of them with metrics={{'name': metric, "
            "...}, or with the argument prefix= of a MetricCollection."
        )
    return {**values, **more}


def _check_update(name: str, metric: Any) -> None:
    """Raises ModelError if the `update` of a metric object cannot be called as `update(outputs, targets)`."""
    try:
        signature = inspect.signature(metric.update)
    except (TypeError, ValueError):
        return
    try:
        second = list(signature.bind("outputs", "targets").arguments)[1:]
    except TypeError:
        fits = False
    else:
        fits = not set(second) & set(_WEIGHTS)
    if not fits:
        raise ModelError(
            f"The metric {name!r} has update{signature}, which does not take (outputs, targets). {WAY_OUT}"
        )


def _describe_kind(metric: Any) -> str:
    return metric.__name__ if isinstance(metric, type) else type(metric).__name__
