"""Metric objects: metrics with a state of their own, such as the metrics of torchmetrics.

An object with `update(outputs, targets)`, `compute()` and `reset()` is updated in the controller only. It gets the
outputs of the whole batch, concatenated in the order of the shards, so its value does not depend on the number of
devices; it depends on the number of shards only because the outputs do. The script's objects are never changed:
training, each evaluation and each step update separate copies, so that one does not change another's state.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from lockstep.core import object_state
from lockstep.core.batches import describe, transform
from lockstep.core.metric_kinds import WAY_OUT, Named, check_names
from lockstep.core.outputs import Outputs, ShardOutputs, join_shards
from lockstep.errors import LockstepError, ModelError, StateError

Setting = Callable[[], AbstractContextManager[Any]]
"""Returns a context with the number of threads and the global switches with which a batch is computed."""


class MetricObjects:
    """The metric objects of a trainer. The objects themselves never change, because only copies are updated."""

    def __init__(self, objects: Sequence[Named], outputs: ShardOutputs | None) -> None:
        self._originals = [(name, given, _reset_copy(name, metric)) for name, given, metric in objects]
        self._outputs = outputs
        self._step: MetricPass | None = None
        self.checked = False  # whether the values after the first batch have been checked

    def __bool__(self) -> bool:
        """Returns whether there are any metric objects."""
        return bool(self._originals)

    def start(self) -> "MetricPass":
        """Returns new copies of the metric objects, for one pass over data."""
        if self._outputs is None:
            return MetricPass([], self, ShardOutputs(False, np.asarray))
        copies = [
            (name, given, self._outputs.to_cpu(_reset_copy(name, metric))) for name, given, metric in self._originals
        ]
        return MetricPass(copies, self, self._outputs)

    def compute_later(self, shards: Mapping[int, Outputs], setting: Setting) -> Callable[[], Mapping[str, float]]:
        """Returns a function that computes the metrics of one batch when it is first called, and stores them."""
        pair = join_shards(shards)
        result: dict[str, float] = {}

        def values() -> Mapping[str, float]:
            if not result:
                self._step = self._step or self.start()
                self._step.reset()
                self._step.add(pair, setting)
                result.update(self._step.values())
                self._step.reset()
            return result

        return values


class MetricPass:
    """Copies of the metric objects, with the state of one pass over data."""

    def __init__(self, metrics: Sequence[Named], owner: MetricObjects, outputs: ShardOutputs) -> None:
        self._metrics = metrics
        self._owner = owner
        self._outputs = outputs
        self._setting: Setting = nullcontext
        self._values: dict[str, float] | None = None

    def __bool__(self) -> bool:
        """Returns whether there are any metric objects."""
        return bool(self._metrics)

    def reset(self) -> None:
        """Resets the copies to the state before the first batch."""
        self._values = None
        for _, _, metric in self._metrics:
            metric.reset()

    def update(self, shards: Mapping[int, Outputs], setting: Setting) -> None:
        """Updates the copies with the outputs and targets of a batch, given by shard."""
        self.add(join_shards(shards), setting)

    def add(self, pair: tuple[Any, Any], setting: Setting) -> None:
        """Updates the copies with the outputs and targets of a whole batch."""
        self._values, self._setting = None, setting
        with setting():
            outputs, targets = transform(pair, self._convert)
            for name, _, metric in self._metrics:
                _update(name, metric, outputs, targets)
        if not self._owner.checked:
            self._check()

    def _convert(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._convert(each) for each in value]
        return self._outputs.to_array(value) if isinstance(value, np.ndarray) else value

    def _check(self) -> None:
        """Raises ModelError if a value after the first batch is not a number.

        Any other exception of `compute()` is ignored, because some metrics have no value after one batch.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.values()
        except LockstepError:
            raise
        except Exception:
            self._values = None
        self._owner.checked = True

    def values(self) -> dict[str, float]:
        """Returns the value of each metric by name, over the batches since the last reset."""
        if self._values is None:
            pairs: list[tuple[str, float]] = []
            with self._setting():
                for name, given, metric in self._metrics:
                    # On a copy, because compute() may change the state, and a progress bar calls this at any time.
                    value = _copy(name, metric).compute()
                    named = (
                        flatten_names(value, f"{name}_" if given else "")
                        if isinstance(value, Mapping)
                        else [(name, value)]
                    )
                    pairs += [(key, self._number(key, each)) for key, each in named]
            check_names([name for name, _ in pairs])
            self._values = dict(pairs)
        return self._values

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool | int | float):
            return float(value)
        what = describe(value)
        if hasattr(value, "shape"):
            array = np.asarray(self._outputs.to_numpy(value))
            if array.size == 1 and array.dtype.kind in "biuf":
                return float(array.reshape(1)[0])
            what = f"an array of shape {array.shape}" if array.dtype.kind in "biuf" else f"an array of {array.dtype}"
        raise ModelError(
            f"compute() of metric {name!r} returned {what}, not one number. Configure the metric to return one number "
            "(e.g. average='macro'), let compute() return a dict of numbers by name, or leave the metric out and "
            "compute its value from trainer.predict."
        )

    def state(self) -> list[Any]:
        """Returns a list of (name, state) of the metric objects, as plain values and arrays for a checkpoint."""
        fresh = self._owner.start()
        return [
            [name, object_state.save(metric, reference, self._outputs.to_numpy, name)]
            for (name, _, metric), (_, _, reference) in zip(self._metrics, fresh._metrics, strict=True)
        ]

    def load_state(self, state: Any, exact: bool, setting: Setting) -> None:
        """Loads a state that `state()` returned.

        If the state belongs to other metric objects, raises StateError if `exact`, and otherwise loads nothing.
        """
        saved = [name for name, _ in state] if isinstance(state, list) else []
        here = [name for name, _, _ in self._metrics]
        if saved != here and not exact:
            return
        if saved != here:
            raise StateError(
                f"The checkpoint was saved inside an epoch with the metric objects {saved or 'none'}, and this run has "
                f"{here}. Use the same metric objects in metrics=, or exact=False, with which the metrics of this "
                "epoch cover only the batches from here on."
            )
        self._values, self._setting = None, setting
        for (name, _, metric), (_, saved_state) in zip(self._metrics, state, strict=True):
            object_state.load(metric, saved_state, self._outputs.to_array, name)


def flatten_names(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for every value in nested dicts; a name is the keys joined with underscores.

    >>> dict(flatten_names({"f1": {"cat": 1.0}, "acc": 0.5}, ""))
    {'f1_cat': 1.0, 'acc': 0.5}
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten_names(value, f"{name}_")
        else:
            yield name, value


def _update(name: str, metric: Any, outputs: Any, targets: Any) -> None:
    call = f"update(outputs, targets) of {name!r} with {describe(outputs)} and {describe(targets)}"
    try:
        metric.update(outputs, targets)
    except LockstepError:
        raise
    except TypeError as error:
        raise ModelError(f"{call} raised {type(error).__name__}: {error}. {WAY_OUT}") from error
    except Exception as error:
        error.add_note(f"In {call}.")
        raise


def _copy(name: str, metric: Any) -> Any:
    try:
        return copy.deepcopy(metric)
    except Exception as error:
        raise ModelError(
            f"The metric object {name!r} cannot be copied: {error}. Training, validation and each step need a copy of "
            "the object. Define __deepcopy__ in its class, or remove the attribute that cannot be copied."
        ) from error


def _reset_copy(name: str, metric: Any) -> Any:
    fresh = _copy(name, metric)
    try:
        fresh.reset()
    except Exception as error:
        raise ModelError(
            f"reset() of metric {name!r}, called before the first batch, raised {type(error).__name__}: {error}. Give "
            "the metric object itself if this is a wrapper, or fix reset()."
        ) from error
    return fresh
