"""Which of the metrics that `wrap` was given are objects with a state of their own."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.metrics import Metric
from lockstep.errors import ModelError

METHODS = ("update", "compute", "reset")
_KERAS = ("update_state", "result", "reset_state")
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")
WAY_OUT = (
    "Give an object of your own with update(outputs, targets), compute() and reset(), which passes on to it what it "
    "needs; what belongs to the examples can be part of the targets."
)

Named = tuple[str, bool, Any]  # a name, whether the script gave it, and the object


def is_metric_object(metric: Any) -> bool:
    """Whether this has `update`, `compute` and `reset`; raises where only some of them are there.

    >>> is_metric_object(len), is_metric_object("accuracy")
    (False, False)
    """
    if isinstance(metric, str | Mapping | set | Metric):
        return False
    name = _describe_kind(metric)
    there = [method for method in METHODS if callable(getattr(metric, method, None))]
    if len(there) == len(METHODS) and isinstance(metric, type):
        raise ModelError(f"A metric object is an instance. Got the class {name}. Write {name}(...).")
    if len(there) == len(METHODS):
        return True
    if all(callable(getattr(metric, method, None)) for method in _KERAS):
        raise ModelError(
            f"keras.metrics belong to Keras models. Got {name} for another model. Give an object whose "
            "update(outputs, targets), compute() and reset() call its update_state(targets, outputs), result() and "
            "reset_state()."
        )
    if there:
        missing = [method for method in METHODS if method not in there]
        raise ModelError(
            f"A metric object has update(outputs, targets), compute() and reset(). Got {name} with "
            f"{' and '.join(there)}, without {' and '.join(missing)}. Add {'it' if len(missing) == 1 else 'them'}, or "
            "give a function of (outputs, targets) or a lockstep.Metric."
        )
    return False


def split(metrics: Any) -> tuple[list[Named], Any]:
    """The metric objects among what `wrap` was given as metrics, and the rest in the same form."""
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
    """Raises where two values would have one name."""
    given = [name for name in names if name]
    if len(set(given)) < len(given) or "loss" in given:
        raise ModelError(f"Metrics need names of their own. Got {given}. Use metrics={{'name': metric, ...}}.")


def merge(values: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """The values of loss and metrics, and those of the metric objects behind them."""
    if values.keys() & more.keys():
        raise ModelError(
            f"Metrics need names of their own. Got {', '.join(sorted(values.keys() & more.keys()))} twice, also from a "
            "metric object. Use metrics={'name': metric, ...}, or the prefix= of a collection."
        )
    return {**values, **more}


def _check_update(name: str, metric: Any) -> None:
    """Refuses an object whose `update` takes other things than outputs and targets."""
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
        raise ModelError(f"A metric object takes (outputs, targets). {name!r} has update{signature}. {WAY_OUT}")


def _describe_kind(metric: Any) -> str:
    return metric.__name__ if isinstance(metric, type) else type(metric).__name__
