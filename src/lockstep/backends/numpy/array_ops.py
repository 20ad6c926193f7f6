"""NumPy's arrays: the collectives' reference. Every device is the CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.core import low_precision


def copy(array: Any, device: str) -> Any:
    """A contiguous copy."""
    return np.array(array, order="C")


def cut(array: Any, where: Any, device: str) -> Any:
    """A contiguous copy of some examples."""
    return np.array(array[where], order="C")


def absent(array: Any) -> str:
    """Every array has its values."""
    return ""


def check(array: Any) -> str:
    """Others' memory is not written to."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return "an array that is read-only. Give its .copy()"
    return ""


def add(left: Any, right: Any) -> Any:
    """NumPy's addition."""
    return np.add(left, right)


def widen(array: Any) -> Any:
    """A copy in float32 or wider; of other types, a copy."""
    name = array.dtype.name
    return np.array(low_precision.widen(array, name) if low_precision.is_float(name) else array)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """In place. A factor is rounded to the array's type first: numpy 1 would compute without axes in float64."""
    for average, value in zip(averages, values, strict=True):
        number = average.dtype.type
        average *= number(decay)
        average += value.astype(average.dtype) * number(1 - decay)
    return averages


def to_numpy(array: Any) -> Any:
    """A copy."""
    return np.array(array)


def from_numpy(data: Any, like: Any) -> Any:
    """A copy."""
    return np.array(data)


def write(value: Any, target: Any) -> Any:
    """In place; a scalar is nobody's memory."""
    if not isinstance(target, np.ndarray):
        return value
    target[...] = value
    return target
