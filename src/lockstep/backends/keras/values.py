"""Values: models and layers without a configuration, as the attributes that they hold.

Many scripts' layers take no `**kwargs` and define no `get_config`, so Keras cannot make them
again. A worker gets such a model as it is in the script: every layer with its own attributes,
every variable with its number, and the trackers by which Keras finds both.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.ops.node import Node
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import python_utils, tracking

from lockstep.backends import pickling
from lockstep.backends.keras import custom_objects

# What `compile` puts into a model; the worker compiles it again.
_UNCOMPILED = {"compiled": False, "loss": None, "_compile_loss": None, "_compile_metrics": None, "_loss_tracker": None}
_COMPILED = {"optimizer", "history", "_compile_config", "_compiled_trainable_state"}
_COMPILED |= {f"{phase}_function" for phase in ("train", "test", "predict")}
_WRAPPED = {"build", "quantize"}  # methods that Keras wraps for each layer as it is made


def has_configuration(layer: Any) -> bool:
    """Whether Keras can make the layer again: from a configuration of its own, or from what `__init__` was given."""
    kind = type(layer)
    owners = [each for each in kind.__mro__ if "from_config" in vars(each)]
    if not python_utils.is_default(layer.get_config) or custom_objects.is_script_s(owners[0]):
        return True
    try:
        inspect.signature(kind).bind(**layer.get_config())
    except (NotImplementedError, TypeError):
        return False
    return True


class Values:
    """The attributes of a model's parts, in the order in which a pickle meets these.

    A layer knows its neighbours, so attributes inside attributes would be as deep as the model. A part
    therefore goes into the pickle without any, and this list of all of them comes last.
    """

    def __init__(self) -> None:
        self._met: list[Any] = []
        self._written = 0

    def reductions(self) -> dict[type, pickling.Reduction]:
        """How the parts go into the pickle; the first kind that fits an object counts."""
        return {
            keras.Layer: self._reduce_part,
            keras.KerasTensor: self._reduce_part,
            Node: self._reduce_part,
            keras.Variable: _reduce_variable,
            tracking.TrackedList: _reduce_tracked,
            tracking.TrackedDict: _reduce_tracked,
            tracking.TrackedOrderedDict: _reduce_tracked,
            tracking.TrackedSet: _reduce_tracked,
            keras.losses.Loss: pickling.by_attributes,
            keras.metrics.Metric: pickling.by_attributes,
            KerasSaveable: pickling.by_attributes,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """A list of (part, attributes), which grows while it is written."""
        return list, (), None, self._attributes()

    def check_complete(self) -> None:
        """Makes sure that every part that the pickle met has its attributes in it."""
        assert self._written == len(self._met)

    def _attributes(self) -> Iterator[tuple[Any, dict[str, Any]] | None]:
        idle = 0
        while idle < 3:  # the pickler asks for one more than it has written, and that one may meet further parts
            if self._written == len(self._met):
                idle += 1
                yield None
            else:
                idle, part = 0, self._met[self._written]
                self._written += 1
                yield part, _attributes(part)

    def _reduce_part(self, part: Any) -> tuple[Any, ...]:
        self._met.append(part)
        return _new_part, (type(part),)


def restore(values: Iterable[tuple[Any, dict[str, Any]] | None]) -> None:
    """Gives every part its attributes."""
    found = [each for each in values if each is not None]
    for part, attributes in found:
        vars(part).update(attributes)
    for part, _ in found:
        if isinstance(part, keras.Layer):
            # A tracker knows what it holds by addresses, which are others in another process.
            tracker = part._tracker
            tracker.stored_ids = {name: set(map(id, store)) for name, (_, store) in tracker.config.items()}


def _attributes(part: Any) -> dict[str, Any]:
    found = {name: value for name, value in vars(part).items() if name not in _WRAPPED or not _is_wrapper(value, part)}
    if "_torch_params" in found.get(
        "_modules", ()
    ):  # torch's list of the variables, which Keras makes when it is asked
        found["_modules"] = {name: each for name, each in found["_modules"].items() if name != "_torch_params"}
    if isinstance(part, keras.Model):
        found = {name: value for name, value in found.items() if name not in _COMPILED} | _UNCOMPILED
    return found


def _is_wrapper(method: Any, layer: Any) -> bool:
    return getattr(getattr(method, "__wrapped__", None), "__self__", None) is layer


def _new_part(kind: Any) -> Any:
    """A part without attributes, but for the methods that Keras wraps; what its class does in `__new__` is left out."""
    return keras.Layer.__new__(kind) if issubclass(kind, keras.Layer) else object.__new__(kind)


def _reduce_variable(variable: Any) -> tuple[Any, ...]:
    """As its attributes and its number, which the worker puts on its own device."""
    state = {name: value for name, value in vars(variable).items() if name != "_value"}
    return object.__new__, (type(variable),), (state, variable.numpy()), None, None, _set_variable


def _set_variable(variable: Any, state: tuple[dict[str, Any], Any]) -> None:
    attributes, number = state
    vars(variable).update(attributes)
    variable._initialize(number)


def _reduce_tracked(value: Any) -> tuple[Any, ...]:
    items = list(value.items()) if isinstance(value, dict) else list(value)
    return _new_tracked, (type(value),), (items, value.tracker), None, None, _fill_tracked


def _new_tracked(kind: Any) -> Any:
    return kind()


def _fill_tracked(value: Any, state: tuple[list[Any], Any]) -> None:
    """Fills it before it has a tracker, which would take what comes for new."""
    items, tracker = state
    value.extend(items) if isinstance(value, list) else value.update(items)
    value.tracker = tracker
