"""The array functions for numpy, on the CPU: the reference for the other backends."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lockstep.core import low_precision


def copy(arrays: Sequence[Any], device: str) -> list[Any]:
    """Returns contiguous copies of the arrays."""
    return [np.array(array, order="C") for array in arrays]


def cut(array: Any, where: Any, device: str) -> Any:
    """Returns a contiguous copy of the examples `array[where]`."""
    return np.array(array[where], order="C")


def absent(array: Any) -> str:
    """Returns an empty string, because every numpy array has a value."""
    return ""


def check(array: Any) -> str:
    """Returns why a sum cannot replace this array: it is read-only. Returns an empty string if it can."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return "an array that is read-only. Give its .copy()"
    return ""


def add(left: Any, right: Any) -> Any:
    """Returns left + right in new memory."""
    return np.add(left, right)


def widen(array: Any) -> Any:
    """Returns a copy; floats shorter than float32 become float32."""
    name = array.dtype.name
    return np.array(low_precision.widen(array, name) if low_precision.is_float(name) else array)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """Sets each average to decay * average + (1 - decay) * value, in place.

    The factors are rounded first, because numpy 1 computes with 0-dimensional arrays in float64.
    """
    for average, value in zip(averages, values, strict=True):
        number = average.dtype.type
        average *= number(decay)
        average += value.astype(average.dtype) * number(1 - decay)
    return averages


def to_numpy(array: Any) -> Any:
    """Returns a copy of the array."""
    return np.array(array)


def from_numpy(data: Any, like: Any) -> Any:
    """Returns a copy of the array."""
    return np.array(data)


def write(value: Any, target: Any) -> Any:
    """Writes the value into an array and returns the array; returns the value if `target` is a numpy scalar."""
    if not isinstance(target, np.ndarray):
        return value
    target[...] = value
    return target


def is_array(value: Any) -> bool:
    """Returns whether this is an ndarray or a numpy scalar."""
    return isinstance(value, np.ndarray | np.generic)


def as_array(value: Any) -> Any:
    """Returns a number or a list of numbers as an array, and an array as it is."""
    return np.asarray(value)


def to_host(array: Any) -> Any:
    """Returns the array itself, which is on the host already."""
    return array


def shape(array: Any) -> tuple[int, ...]:
    """Returns the array's shape; () for a scalar."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns the array's elements in another shape, as a view if possible."""
    return array.reshape(shape)


def double(array: Any) -> Any:
    """Returns the array or number in float64."""
    return np.asarray(array, "float64")


def cast_like(value: Any, array: Any) -> Any:
    """Returns the value in the dtype of `array`."""
    return np.asarray(value, array.dtype)


def average(array: Any) -> Any:
    """Returns the mean of all elements."""
    return array.mean()


def average_rows(array: Any, examples: int) -> Any:
    """Returns the mean of each example's elements."""
    return array.reshape(examples, -1).mean(1)


def total(array: Any) -> Any:
    """Returns the sum of all elements."""
    return array.sum()


def scale(array: Any, factor: Any) -> Any:
    """Returns array * factor, with the factor first rounded to the array's dtype."""
    return array * array.dtype.type(factor)


def divide(array: Any, by: Any) -> Any:
    """Returns array / by. If `by` is 0, divides by 1."""
    return array / array.dtype.type(by or 1)


def as_weight(value: Any) -> Any:
    """Returns a number by which a sum is divided, in float64."""
    return np.float64(value)


def as_column(weights: Any, values: Any) -> Any:
    """Returns the weights in the shape (examples, 1, ...), so that they broadcast over `values`."""
    return weights.reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """Returns `array` where the condition is true, else `other`, element by element."""
    return np.where(condition, array, other)


def any_nonzero(array: Any) -> Any:
    """Returns whether any element is not 0; NaN counts as not 0."""
    return np.any(array)


def is_finite_nonzero(value: Any) -> Any:
    """Returns whether a scalar is finite and not 0."""
    return np.isfinite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Returns whether the dtype is float16, whose gradients are added in float32."""
    return bool(array.dtype == np.float16)


def argmax(array: Any, axis: int) -> Any:
    """Returns the position of the largest element on the axis; of equal elements, the first."""
    return array.argmax(axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """Returns whether each label is among the `num` largest elements on the axis; of equal elements the first count."""
    best = np.take(np.argsort(-array, axis, kind="stable"), range(num), axis)
    return (best == np.expand_dims(labels, axis)).any(axis)


def equal(left: Any, right: Any) -> Any:
    """Compares elementwise, in numpy's common dtype of both arrays."""
    return np.equal(left, right)


def count_true(array: Any) -> Any:
    """Returns the number of true elements as an integer."""
    return array.sum()


def join(parts: Iterable[tuple[Any, float]]) -> Any:
    """Returns one float64 vector of numbers and arrays, each multiplied by its factor."""
    return np.concatenate([np.ravel(double(value)) * times for value, times in parts])
