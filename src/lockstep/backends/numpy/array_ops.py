"""NumPy's arrays: the collectives' reference. Every device is the CPU."""

from collections.abc import Iterable, Sequence
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
    """In place; a scalar has no memory to write to, so it is returned."""
    if not isinstance(target, np.ndarray):
        return value
    target[...] = value
    return target


def is_array(value: Any) -> bool:
    """An ndarray, or one of numpy's scalars."""
    return isinstance(value, np.ndarray | np.generic)


def as_array(value: Any) -> Any:
    """As numpy makes an array."""
    return np.asarray(value)


def to_host(array: Any) -> Any:
    """The array itself."""
    return array


def shape(array: Any) -> tuple[int, ...]:
    """Of an array."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """A view if there is one."""
    return array.reshape(shape)


def double(array: Any) -> Any:
    """float64."""
    return np.asarray(array, "float64")


def cast_like(value: Any, array: Any) -> Any:
    """Rounded to the other's type."""
    return np.asarray(value, array.dtype)


def average(array: Any) -> Any:
    """numpy's mean."""
    return array.mean()


def average_rows(array: Any, examples: int) -> Any:
    """numpy's mean of every row."""
    return array.reshape(examples, -1).mean(1)


def total(array: Any) -> Any:
    """numpy's sum."""
    return array.sum()


def scale(array: Any, factor: Any) -> Any:
    """The factor is rounded first."""
    return array * array.dtype.type(factor)


def divide(array: Any, by: Any) -> Any:
    """By 1 instead of 0."""
    return array / array.dtype.type(by or 1)


def as_weight(value: Any) -> Any:
    """float64."""
    return np.float64(value)


def as_column(weights: Any, values: Any) -> Any:
    """A view."""
    return weights.reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """numpy's choice."""
    return np.where(condition, array, other)


def any_nonzero(array: Any) -> Any:
    """NaN is not 0."""
    return np.any(array)


def is_finite_nonzero(value: Any) -> Any:
    """Of one number."""
    return np.isfinite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """float16; smaller floats are added in float32."""
    return bool(array.dtype == np.float16)


def argmax(array: Any, axis: int) -> Any:
    """The first of equals."""
    return array.argmax(axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """The first of equals count."""
    best = np.take(np.argsort(-array, axis, kind="stable"), range(num), axis)
    return (best == np.expand_dims(labels, axis)).any(axis)


def equal(left: Any, right: Any) -> Any:
    """As numpy compares."""
    return np.equal(left, right)


def count_true(array: Any) -> Any:
    """A plain integer type."""
    return array.sum()


def join(parts: Iterable[tuple[Any, float]]) -> Any:
    """One float64 vector of numbers and arrays, each times a plain number."""
    return np.concatenate([np.ravel(double(value)) * times for value, times in parts])
