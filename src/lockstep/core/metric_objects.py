"""Metric objects: those with a state of their own, such as torchmetrics'.

An object with `update(outputs, targets)`, `compute()` and `reset()` runs in the
controlling process alone. It gets the whole batch, joined in the order of the shards,
so its value does not depend on the number of devices, nor on that of shards beyond
the bits of the outputs. What the script holds stays as it is: training, every
evaluation and every step work on copies, so none disturbs another's state.
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
from lockstep.core.outputs import Pair, ShardOutputs, join_shards
from lockstep.errors import LockstepError, ModelError, StateError

Setting = Callable[[], AbstractContextManager[Any]]  # the threads and switches of a batch, and no other trainer


class MetricObjects:
    """The metric objects of a trainer, which are never updated themselves."""

    def __init__(self, objects: Sequence[Named], outputs: ShardOutputs | None) -> None:
        self._originals = [(name, given, _reset_copy(name, metric)) for name, given, metric in objects]
        self._outputs = outputs
        self._step: MetricPass | None = None
        self.checked = False  # whether a first batch has shown that every value is a number

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._originals)

    def start(self) -> "MetricPass":
        """Fresh copies, for one pass over data."""
        if self._outputs is None:
            return MetricPass([], self, ShardOutputs(False, np.asarray))
        copies = [
            (name, given, self._outputs.to_cpu(_reset_copy(name, metric))) for name, given, metric in self._originals
        ]
        return MetricPass(copies, self, self._outputs)

    def of_batch(self, shards: Mapping[int, Pair], setting: Setting) -> Callable[[], Mapping[str, float]]:
        """The values of one batch alone, computed when they are asked for first."""
        pair = join_shards(shards)
        found: dict[str, float] = {}

        def values() -> Mapping[str, float]:
            if not found:
                self._step = self._step or self.start()
                self._step.reset()
                self._step.add(pair, setting)
                found.update(self._step.values())
                self._step.reset()
            return found

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
        """Whether there is anything to update."""
        return bool(self._metrics)

    def reset(self) -> None:
        """Back to the state before the first batch."""
        self._values = None
        for _, _, metric in self._metrics:
            metric.reset()

    def update(self, shards: Mapping[int, Pair], setting: Setting) -> None:
        """Takes one more batch, given by shard."""
        self.add(join_shards(shards), setting)

    def add(self, pair: Pair, setting: Setting) -> None:
        """Takes one more batch, given as a whole."""
        self._values, self._setting = None, setting
        with setting():
            outputs, targets = transform(pair, self._array)
            for name, _, metric in self._metrics:
                _update(name, metric, outputs, targets)
        if not self._owner.checked:
            self._check()

    def _array(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._array(each) for each in value]
        return self._outputs.to_array(value) if isinstance(value, np.ndarray) else value

    def _check(self) -> None:
        """Refuses at the first batch what is no number; that a metric has no value yet is no error here."""
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
        """One number for each name, over what was taken since the last reset."""
        if self._values is None:
            found: list[tuple[str, float]] = []
            with self._setting():
                for name, given, metric in self._metrics:
                    value = _copy(name, metric).compute()  # it may change the state, and a bar looks by the clock
                    named = (
                        rename(value, f"{name}_" if given else "") if isinstance(value, Mapping) else [(name, value)]
                    )
                    found += [(key, self._number(key, each)) for key, each in named]
            check_names([name for name, _ in found])
            self._values = dict(found)
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
            f"A metric gives one number for each name. Got {what} from compute() of {name!r}. Ask it for one number "
            "(average='macro', say), let compute() return a dict of numbers by name, or leave it out and compute it "
            "from trainer.predict."
        )

    def state(self) -> list[Any]:
        """The state of every object as plain values and arrays, for a checkpoint."""
        fresh = self._owner.start()
        return [
            [name, object_state.save(metric, reference, self._outputs.to_numpy, name)]
            for (name, _, metric), (_, _, reference) in zip(self._metrics, fresh._metrics, strict=True)
        ]

    def load_state(self, state: Any, exact: bool, setting: Setting) -> None:
        """Takes over such a state; raises where it is not of these objects, which begin anew if not `exact`."""
        saved = [name for name, _ in state] if isinstance(state, list) else []
        here = [name for name, _, _ in self._metrics]
        if saved != here and not exact:
            return
        if saved != here:
            raise StateError(
                f"A checkpoint in the middle of an epoch holds the state of its metric objects: {saved or 'none'}. "
                f"This run has {here}. Give metrics= the same objects, or use exact=False, which lets their first "
                "epoch begin here."
            )
        self._values, self._setting = None, setting
        for (name, _, metric), (_, nest) in zip(self._metrics, state, strict=True):
            object_state.load(metric, nest, self._outputs.to_array, name)


def rename(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The values of a nest of dicts under flat names.

    >>> dict(rename({"f1": {"cat": 1.0}, "acc": 0.5}, ""))
    {'f1_cat': 1.0, 'acc': 0.5}
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from rename(value, f"{name}_")
        else:
            yield name, value


def _update(name: str, metric: Any, outputs: Any, targets: Any) -> None:
    call = f"update(outputs, targets) of {name!r} with {describe(outputs)} and {describe(targets)}"
    try:
        metric.update(outputs, targets)
    except LockstepError:
        raise
    except TypeError as error:
        raise ModelError(
            f"A metric object takes (outputs, targets). Calling {call} fails: {error}. {WAY_OUT}"
        ) from error
    except Exception as error:
        error.add_note(f"In {call}.")
        raise


def _copy(name: str, metric: Any) -> Any:
    try:
        return copy.deepcopy(metric)
    except Exception as error:
        raise ModelError(
            "Training, validation and every step have a copy of a metric object each. "
            f"{name!r} cannot be copied: {error}. Give its class a __deepcopy__, or leave out what cannot be copied."
        ) from error


def _reset_copy(name: str, metric: Any) -> Any:
    fresh = _copy(name, metric)
    try:
        fresh.reset()
    except Exception as error:
        raise ModelError(
            f"A metric object can be reset before its first batch. reset() of {name!r} raises "
            f"{type(error).__name__}: {error}. Give the object without what wraps it, or mend its reset()."
        ) from error
    return fresh
