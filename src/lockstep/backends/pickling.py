"""Pickling: objects whose own way into a pickle loses something, as what they hold."""

import copyreg
import io
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

Reduction = Callable[[Any], tuple[Any, ...]]


def dump(value: Any, reductions: Mapping[type, Reduction]) -> bytes:
    """One pickle; an instance of one of these types goes in as its reduction says.

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
    """An object as what it holds."""
    return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]  # pickle's own


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # without stubs it is Any
    def __init__(self, buffer: io.BytesIO, reductions: Mapping[type, Reduction]) -> None:
        super().__init__(buffer)
        self._reductions = reductions

    def reducer_override(self, value: Any) -> Any:
        for kind, reduction in self._reductions.items():
            if isinstance(value, kind):
                return reduction(value)
        return super().reducer_override(value)
