"""Converts the state of an arbitrary object to plain values and arrays, and loads it into a new copy of the object.

All attributes are followed. Numbers, strings, arrays, containers, and the objects in them are saved. Functions, and
values that are equal in a new copy, are code or configuration and are not saved. Saving raises for any other value.
Pickle is not used: loading runs no code from the file and creates no object of a class that the file names.
"""

import inspect
from collections import deque
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np

from lockstep.errors import StateError

_PLAIN = (bool, int, float, str, bytes, type(None))
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, partial, inspect.Signature)
_CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_MISSING = object()


class _Simple:
    """A class whose objects have all of their state in `__dict__`; its size is compared with that of other classes."""


def save(value: Any, fresh: Any, to_numpy: Callable[[Any], Any], name: str) -> Any:
    """Returns the state of `value` as a pytree of plain values and arrays; `fresh` is a copy that was never updated.

    `to_numpy` converts the framework's arrays to numpy; `name` is the object's name in errors.

    >>> class Mean:
    ...     def __init__(self):
    ...         self.values = []
    >>> used, fresh = Mean(), Mean()
    >>> used.values += [1.0, 2.0]
    >>> load(fresh, save(used, Mean(), np.asarray, "mean"), np.array, "mean")
    >>> fresh.values
    [1.0, 2.0]
    """
    return _Saving(to_numpy).save(value, fresh, name)


def load(fresh: Any, state: Any, to_array: Callable[[Any], Any], name: str) -> None:
    """Loads a saved state into `fresh`, a copy that was never updated; `to_array` converts numpy to the framework."""
    try:
        _Loading(to_array).load(state, fresh)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"The checkpoint does not fit the metric object {name!r}: {error}. Use the metric object with which the "
            "checkpoint was saved."
        ) from error


class _Saving:
    """Converts one object to plain values. Further occurrences of a value are saved as references to the first."""

    def __init__(self, to_numpy: Callable[[Any], Any]) -> None:
        self._to_numpy = to_numpy
        # By id: each value's number, and the value itself, so that no other object gets the same id.
        self._seen: dict[int, tuple[int, Any]] = {}

    def save(self, value: Any, fresh: Any, where: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._seen:
            return {"same": self._seen[id(value)][0]}
        if value is fresh or isinstance(value, _CODE):
            return self._keep(value, fresh, where)
        number = len(self._seen)
        self._seen[id(value)] = number, value
        kind, content = self._content(value, fresh, where)
        return {"kind": kind, "number": number, "content": content}

    def _content(self, value: Any, fresh: Any, where: str) -> tuple[str, Any]:
        name = type(value).__name__
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return self._array(value, where)
        if _CONTAINERS.get(name) is type(value):
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            others = [*(fresh if isinstance(fresh, list | tuple) else []), *[_MISSING] * len(value)]
            return name, [self.save(item, others[i], f"{where}[{i}]") for i, item in enumerate(items)]
        if isinstance(value, dict) and (type(value) is dict or type(value) is type(fresh)):
            return "dict", self._pairs(value, fresh if isinstance(fresh, dict) else {}, where)
        if type(value) is type(fresh) and _is_simple(value):
            return "object", self._pairs(vars(value), vars(fresh), where)
        self._keep(value, fresh, where)
        return "keep", None

    def _pairs(self, values: dict[Any, Any], others: dict[Any, Any], where: str) -> list[Any]:
        for key in values:
            if type(key) not in _PLAIN:
                _refuse(key, f"{where}[{key!r}]")
        return [[key, self.save(each, others.get(key, _MISSING), f"{where}.{key}")] for key, each in values.items()]

    def _array(self, value: Any, where: str) -> tuple[str, Any]:
        kind = "numpy" if isinstance(value, np.ndarray | np.generic) else "array"
        array = np.array(value if kind == "numpy" else self._to_numpy(value))
        if array.dtype.kind not in "biufc" or array.dtype.name != _dtype_name(value):
            _refuse(value, where)  # numpy has no bfloat16
        return ("scalar" if isinstance(value, np.generic) else kind), array

    def _keep(self, value: Any, fresh: Any, where: str) -> Any:
        """Returns a mark in place of a value that a new copy of the object has too; raises for any other value."""
        if not (value is fresh or (type(value) is type(fresh) and (isinstance(value, _CODE) or value == fresh))):
            _refuse(value, where)
        return {"keep": True}


class _Loading:
    """Loads the plain values of a saved state into one object."""

    def __init__(self, to_array: Callable[[Any], Any]) -> None:
        self._to_array = to_array
        self._loaded: dict[int, Any] = {}

    def load(self, state: Any, fresh: Any) -> Any:
        if type(state) in _PLAIN:
            return state
        if "same" in state:
            return self._loaded[state["same"]]
        if "keep" in state or state["kind"] == "keep":
            if fresh is _MISSING:
                raise ValueError("an attribute is missing")
            self._loaded[state.get("number", -1)] = fresh
            return fresh
        kind, number, content = state["kind"], state["number"], state["content"]
        if kind in ("dict", "object"):
            return self._fill(kind, number, content, fresh)
        if kind in _CONTAINERS:
            others = [*(fresh if isinstance(fresh, list | tuple) else []), *[_MISSING] * len(content)]
            items: list[Any] = []
            self._loaded[number] = items
            items += [self.load(item, other) for item, other in zip(content, others, strict=False)]
            self._loaded[number] = items if kind == "list" else _CONTAINERS[kind](items)
        else:
            converters: dict[str, Callable[[Any], Any]] = {
                "numpy": np.array,
                "array": self._to_array,
                "scalar": _scalar,
            }
            self._loaded[number] = converters[kind](content)
        return self._loaded[number]

    def _fill(self, kind: str, number: int, pairs: list[Any], fresh: Any) -> Any:
        """Loads values into an existing object or dict of the copy, because creating one of its class may fail."""
        filled = fresh if kind == "object" or isinstance(fresh, dict) else {}
        target: dict[Any, Any] = vars(filled) if kind == "object" else filled
        self._loaded[number] = filled
        values = {key: self.load(each, target.get(key, _MISSING)) for key, each in pairs}
        target.clear()
        target.update(values)
        return filled


def _scalar(array: Any) -> Any:
    return array[()]


def _dtype_name(array: Any) -> str:
    dtype = array.dtype
    return getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]


def _is_simple(value: Any) -> bool:
    """Returns whether the complete state of an object is in its `__dict__`, not in slots or in memory of a C type."""
    return hasattr(value, "__dict__") and type(value).__basicsize__ <= _Simple.__basicsize__


def _refuse(value: Any, where: str) -> NoReturn:
    raise StateError(
        f"A checkpoint cannot store the {type(value).__name__} at {where} of a metric object. Use numbers, strings, "
        "arrays, and lists, tuples, sets and dicts of these, or train without a checkpoint."
    )
