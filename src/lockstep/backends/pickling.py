"""Pickles objects by their attributes if their own `__reduce__` drops some of the attributes."""

import copyreg
import io
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import cloudpickle

# What `__reduce__` may return: a tuple, or the name of a global; NotImplemented leaves the value to pickle.
Reduction = Callable[[Any], Any]


def dump(value: Any, reductions: Mapping[type, Reduction], has_module_names: bool = True) -> bytes:
    """Pickles a value with cloudpickle; `reductions` has a function in place of `__reduce__` for some types.

    Without `has_module_names` a function that is pickled by value does not know the name of its module, which in
    another process has not the globals of this one. torch.compile would look for them there.

    >>> class Loss:
    ...     def __reduce__(self): return Loss, ()
    >>> loss = Loss()
    >>> loss.dtype = "float64"
    >>> cloudpickle.loads(dump(loss, {Loss: by_attributes})).dtype
    'float64'
    """
    buffer = io.BytesIO()
    _Pickler(buffer, reductions, has_module_names).dump(value)
    return buffer.getvalue()


def by_attributes(value: Any) -> tuple[Any, ...]:
    """Returns how pickle should store an object: as its class and its attributes."""
    return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]  # pickle's own


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # without stubs it is Any
    def __init__(self, buffer: io.BytesIO, reductions: Mapping[type, Reduction], has_module_names: bool) -> None:
        super().__init__(buffer)
        self._reductions = reductions
        self._has_module_names = has_module_names

    def reducer_override(self, value: Any) -> Any:
        for kind, reduction in self._reductions.items():
            if isinstance(value, kind) and (reduced := reduction(value)) is not NotImplemented:
                return reduced
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and reduced is not NotImplemented and not self._has_module_names:
            _, (_, module_globals, *_), *_ = reduced
            module_globals.pop("__name__", None)
        return reduced
