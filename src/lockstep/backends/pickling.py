"""Pickles objects by their attributes if their own `__reduce__` drops some of the attributes."""

import copyreg
import io
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

# What `__reduce__` may return: a tuple, or the name of a global; NotImplemented leaves the value to pickle.
Reduction = Callable[[Any], Any]


def dump(value: Any, reductions: Mapping[type, Reduction]) -> bytes:
    """Pickles a value with cloudpickle; `reductions` has a function in place of `__reduce__` for some types.

    >>> class Loss:
    ...     def __reduce__(self): return Loss, ()
    >>> loss = Loss()
    >>> loss.dtype = "float64"
    >>> cloudpickle.loads(dump(loss, {Loss: by_attributes})).dtype
    'float64'
    """
    buffer = io.BytesIO()
    _Pickler(buffer, reductions).dump(value)
    return buffer.getvalue()


def by_attributes(value: Any) -> tuple[Any, ...]:
    """Returns how pickle should store an object: as its class and its attributes."""
    return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]  # pickle's own


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # without stubs it is Any
    def __init__(self, buffer: io.BytesIO, reductions: Mapping[type, Reduction]) -> None:
        super().__init__(buffer)
        self._reductions = reductions

    def reducer_override(self, value: Any) -> Any:
        for kind, reduction in self._reductions.items():
            if isinstance(value, kind) and (reduced := reduction(value)) is not NotImplemented:
                return reduced
        return super().reducer_override(value)
