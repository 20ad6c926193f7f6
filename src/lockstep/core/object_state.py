"""The state of an arbitrary object as plain values and arrays, and back into a fresh copy of it.

It walks the attributes: numbers, strings, arrays, containers and objects within are
saved; functions, and what equals its counterpart in a fresh copy, are code or
configuration and stay the copy's own. Anything else is refused when it is saved.
No pickle: loading runs nothing of the file's and makes no object of a class it names.
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
    """An object of a class like this one holds nothing beside its `__dict__`."""


def save(value: Any, fresh: Any, to_numpy: Callable[[Any], Any], name: str) -> Any:
    """The state of `value` as a nest of plain values, given a copy `fresh` that was never updated.

    `to_numpy` turns the framework's arrays into numpy; `name` names the object in errors.

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


def load(fresh: Any, nest: Any, to_array: Callable[[Any], Any], name: str) -> None:
    """Fills a copy that was never updated with a saved state; `to_array` makes the framework's arrays of numpy's."""
    try:
        _Loading(to_array).load(nest, fresh)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"The checkpoint does not fit the metric object {name!r}: {error}. Use the object it was saved with."
        ) from error


class _Saving:
    """One walk over an object; what is met a second time is saved as a reference to the first."""

    def __init__(self, to_numpy: Callable[[Any], Any]) -> None:
        self._to_numpy = to_numpy
        self._met: dict[int, tuple[int, Any]] = {}  # of an id: its number, and what it is, so that no id comes twice

    def save(self, value: Any, fresh: Any, where: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._met:
            return {"same": self._met[id(value)][0]}
        if value is fresh or isinstance(value, _CODE):
            return self._keep(value, fresh, where)
        number = len(self._met)
        self._met[id(value)] = number, value
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
        """What a fresh copy has as well."""
        if not (value is fresh or (type(value) is type(fresh) and (isinstance(value, _CODE) or value == fresh))):
            _refuse(value, where)
        return {"keep": True}


class _Loading:
    """The way back."""

    def __init__(self, to_array: Callable[[Any], Any]) -> None:
        self._to_array = to_array
        self._made: dict[int, Any] = {}

    def load(self, nest: Any, fresh: Any) -> Any:
        if type(nest) in _PLAIN:
            return nest
        if "same" in nest:
            return self._made[nest["same"]]
        if "keep" in nest or nest["kind"] == "keep":
            if fresh is _MISSING:
                raise ValueError("an attribute is missing")
            self._made[nest.get("number", -1)] = fresh
            return fresh
        kind, number, content = nest["kind"], nest["number"], nest["content"]
        if kind in ("dict", "object"):
            return self._filled(kind, number, content, fresh)
        if kind in _CONTAINERS:
            others = [*(fresh if isinstance(fresh, list | tuple) else []), *[_MISSING] * len(content)]
            made: list[Any] = []
            self._made[number] = made
            made += [self.load(item, other) for item, other in zip(content, others, strict=False)]
            self._made[number] = made if kind == "list" else _CONTAINERS[kind](made)
        else:
            made_by: dict[str, Callable[[Any], Any]] = {"numpy": np.array, "array": self._to_array, "scalar": _scalar}
            self._made[number] = made_by[kind](content)
        return self._made[number]

    def _filled(self, kind: str, number: int, pairs: list[Any], fresh: Any) -> Any:
        """An object or a dict of the copy's own, in place: it may be of a class of its own."""
        made = fresh if kind == "object" or isinstance(fresh, dict) else {}
        target: dict[Any, Any] = vars(made) if kind == "object" else made
        self._made[number] = made
        values = {key: self.load(each, target.get(key, _MISSING)) for key, each in pairs}
        target.clear()
        target.update(values)
        return made


def _scalar(array: Any) -> Any:
    return array[()]


def _dtype_name(array: Any) -> str:
    dtype = array.dtype
    return getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]


def _is_simple(value: Any) -> bool:
    """Whether all of the object lies in its `__dict__`: no slots, no memory of a C type."""
    return hasattr(value, "__dict__") and type(value).__basicsize__ <= _Simple.__basicsize__


def _refuse(value: Any, where: str) -> NoReturn:
    raise StateError(
        "A checkpoint holds a metric object's numbers, strings, arrays and containers of them. "
        f"Got a {type(value).__name__} at {where}. Keep arrays instead, or train without a checkpoint."
    )
