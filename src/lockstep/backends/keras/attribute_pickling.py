"""Pickles models and layers without a configuration by their attributes.

The layers of many scripts take no `**kwargs` and define no `get_config`, so Keras cannot create them from a
configuration. A worker gets such a model as it is in the script: every layer with its attributes, every variable with
its value, and the trackers with which Keras finds layers and variables.
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

# What `compile` sets in a model: reset to these values or removed, because the worker compiles the model again.
_UNCOMPILED = {"compiled": False, "loss": None, "_compile_loss": None, "_compile_metrics": None, "_loss_tracker": None}
_COMPILED = {"optimizer", "history", "_compile_config", "_compiled_trainable_state"}
_COMPILED |= {f"{phase}_function" for phase in ("train", "test", "predict")}
_WRAPPED = {"build", "quantize"}  # methods that Keras wraps in each layer when it creates the layer


def has_configuration(layer: Any) -> bool:
    """Returns whether Keras can create the layer from its own `get_config`, or from the arguments of `__init__`."""
    kind = type(layer)
    owners = [each for each in kind.__mro__ if "from_config" in vars(each)]
    if not python_utils.is_default(layer.get_config) or custom_objects.is_custom(owners[0]):
        return True
    try:
        inspect.signature(kind).bind(**layer.get_config())
    except (NotImplementedError, TypeError):
        return False
    return True


class ModelAttributes:
    """The attributes of a model's parts (layers, tensors, nodes), in the order in which the pickler finds the parts.

    A layer refers to the layers around it. If a part were pickled with its attributes, the recursion would be as deep
    as the model. So a part is pickled without them, and this list of all attributes is pickled last.
    """

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._num_written = 0

    def list_reductions(self) -> dict[type, pickling.Reduction]:
        """Returns the function that pickles each kind of part; the first entry that fits an object is used."""
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
        """Returns how to pickle this object: as a list of (part, attributes), which grows while it is pickled."""
        return list, (), None, self._iterate()

    def check_complete(self) -> None:
        """Asserts that the attributes of every part were pickled."""
        assert self._num_written == len(self._parts)

    def _iterate(self) -> Iterator[tuple[Any, dict[str, Any]] | None]:
        """Yields every part with its attributes, and None while no part waits."""
        num_idle = 0
        # The pickler takes the next entry before it pickles the previous entry, in which it may find further parts. So
        # None follows the last part until that part's entry must have been pickled.
        while num_idle < 3:
            if self._num_written == len(self._parts):
                num_idle += 1
                yield None
            else:
                num_idle, part = 0, self._parts[self._num_written]
                self._num_written += 1
                yield part, _read_attributes(part)

    def _reduce_part(self, part: Any) -> tuple[Any, ...]:
        """Pickles a part without its attributes; called once for each part, because pickle remembers objects."""
        self._parts.append(part)
        return _create_part, (type(part),)


def restore_attributes(entries: Iterable[tuple[Any, dict[str, Any]] | None]) -> None:
    """Sets the attributes of every unpickled part."""
    parts = [each for each in entries if each is not None]
    for part, attributes in parts:
        vars(part).update(attributes)
    for part, _ in parts:
        if isinstance(part, keras.Layer):
            # A tracker identifies objects by their addresses, which differ in another process.
            tracker = part._tracker
            tracker.stored_ids = {name: set(map(id, store)) for name, (_, store) in tracker.config.items()}


def _read_attributes(part: Any) -> dict[str, Any]:
    """Returns the attributes of a part without those that the worker's own part gets in another way."""
    result = {name: value for name, value in vars(part).items() if name not in _WRAPPED or not _is_wrapper(value, part)}
    if "_torch_params" in result.get("_modules", ()):  # PyTorch's list of the variables, which Keras creates on demand
        result["_modules"] = {name: each for name, each in result["_modules"].items() if name != "_torch_params"}
    if isinstance(part, keras.Model):
        result = {name: value for name, value in result.items() if name not in _COMPILED} | _UNCOMPILED
    return result


def _is_wrapper(method: Any, layer: Any) -> bool:
    """Returns whether this is Keras's wrapper around a method of the layer's own class."""
    return getattr(getattr(method, "__wrapped__", None), "__self__", None) is layer


def _create_part(kind: Any) -> Any:
    """Creates a part with no attributes but the methods that Keras wraps; does not call its class's own `__new__`."""
    return keras.Layer.__new__(kind) if issubclass(kind, keras.Layer) else object.__new__(kind)


def _reduce_variable(variable: Any) -> tuple[Any, ...]:
    """Pickles a variable as its attributes and its value, which the worker copies to its own device."""
    state = {name: value for name, value in vars(variable).items() if name != "_value"}
    return object.__new__, (type(variable),), (state, variable.numpy()), None, None, _set_variable


def _set_variable(variable: Any, state: tuple[dict[str, Any], Any]) -> None:
    """Sets the attributes of an unpickled variable, and creates its value on the worker's device."""
    attributes, value = state
    vars(variable).update(attributes)
    variable._initialize(value)


def _reduce_tracked(value: Any) -> tuple[Any, ...]:
    """Pickles one of Keras's containers that track layers and variables: its items, then its tracker."""
    items = list(value.items()) if isinstance(value, dict) else list(value)
    return _create_tracked, (type(value),), (items, value.tracker), None, None, _fill_tracked


def _create_tracked(kind: Any) -> Any:
    """Creates an empty container without a tracker."""
    return kind()


def _fill_tracked(value: Any, state: tuple[list[Any], Any]) -> None:
    """Fills the container before it gets its tracker, which would track the items a second time."""
    items, tracker = state
    value.extend(items) if isinstance(value, list) else value.update(items)
    value.tracker = tracker
