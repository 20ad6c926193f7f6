"""Pickling: objects whose own way into a pickle loses something, as what they hold."""

import copyreg
import io
from typing import Any

import cloudpickle


def dump(value: Any, kinds: tuple[type, ...]) -> bytes:
    """One pickle; instances of `kinds` go in by their attributes.

    >>> class Loss:
    ...     def __reduce__(self): return Loss, ()
    >>> loss = Loss()
    >>> loss.dtype = "float64"
    >>> cloudpickle.loads(dump(loss, (Loss,))).dtype
    'float64'
    """
    buffer = io.BytesIO()
    _Pickler(buffer, kinds).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # without stubs it is Any
    def __init__(self, buffer: io.BytesIO, kinds: tuple[type, ...]) -> None:
        super().__init__(buffer)
        self._kinds = kinds

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, self._kinds):
            return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]  # pickle's own
        return super().reducer_override(value)
