"""Array functions for TensorFlow, whose tensors are immutable: only variables can be written to."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def copy(arrays: Sequence[Any], device: str) -> list[Any]:
    """Returns variables on the device, trainable if the originals are."""
    with tf.device(_find_device(device)):
        return [tf.Variable(tf.convert_to_tensor(each), trainable=getattr(each, "trainable", True)) for each in arrays]


def cut(array: Any, where: Any, device: str) -> Any:
    """Returns a copy of the examples `array[where]` on the device."""
    with tf.device(_find_device(device)):
        return tf.identity(array[where])


def absent(array: Any) -> str:
    """Returns why this array has no value now; an empty string if it has a value."""
    if not tf.executing_eagerly():
        return "a tensor inside a tf.function. Call it outside, with what the function returns"
    if isinstance(array, tf.Tensor | tf.Variable | tf.IndexedSlices):
        return ""
    return f"a {type(array).__name__}. Give a tensor or a tf.Variable, such as the .value of a Keras variable"


def check(array: Any) -> str:
    """Returns an empty string: a sum can replace every array, because variables can be written and tensors copied."""
    return ""


def add(left: Any, right: Any) -> Any:
    """Returns left + right on the left tensor's device; converts sparse gradients to dense tensors."""
    with tf.device(left.device):
        return tf.add(tf.convert_to_tensor(left), tf.convert_to_tensor(right))


def widen(array: Any) -> Any:
    """Returns the current value in at least float32, in a tensor that later writes to the variable do not change."""
    with tf.device(array.device):
        return tf.cast(array, tf.float32) if array.dtype in (tf.float16, tf.bfloat16) else tf.identity(array)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """Returns decay * average + (1 - decay) * value for every pair, in new tensors.

    Each operation runs in a kernel of its own, so that each result is rounded.
    """
    result = []
    for average, value in zip(averages, values, strict=True):
        with tf.device(average.device):
            newest = tf.cast(value, average.dtype)
            result.append(tf.add(tf.multiply(average, decay), tf.multiply(newest, 1 - decay)))
    return result


def to_numpy(array: Any) -> Any:
    """Returns a numpy copy of a tensor or variable."""
    return np.array(array.numpy())


def from_numpy(data: Any, like: Any) -> Any:
    """Returns a copy of a numpy array on the device of `like`."""
    with tf.device(like.device):
        return tf.identity(tf.convert_to_tensor(data))


def write(value: Any, target: Any) -> Any:
    """Writes the value into a variable and returns it; for a tensor, returns a copy of the value on its device."""
    if isinstance(target, tf.Variable):
        target.assign(value)
        return target
    with tf.device(target.device):
        return tf.identity(tf.convert_to_tensor(value))


def _find_device(name: str) -> str:
    kind, _, index = name.partition(":")
    devices = tf.config.list_logical_devices(kind.upper())
    # Only a CPU's index can be too large: TensorFlow has one CPU device unless it was configured otherwise.
    return str(devices[int(index) % len(devices)].name)


def is_array(value: Any) -> bool:
    """Returns whether this is a tensor, symbolic or not, or a variable."""
    return bool(tf.is_tensor(value))


def as_array(value: Any) -> Any:
    """Returns the value as a tensor."""
    return tf.convert_to_tensor(value)


def to_host(array: Any) -> Any:
    """Returns the elements as a numpy array; None while TensorFlow traces a function."""
    return array.numpy() if tf.executing_eagerly() else None


def shape(array: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor, which may be symbolic."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns the tensor's elements in another shape."""
    return tf.reshape(array, shape)


def double(array: Any) -> Any:
    """Casts a tensor or a number to float64."""
    return tf.cast(array, tf.float64)


def cast_like(value: Any, array: Any) -> Any:
    """Casts the value to the dtype of `array`."""
    return tf.cast(value, array.dtype)


def average(array: Any) -> Any:
    """Returns the mean of all elements."""
    return tf.reduce_mean(array)


def average_rows(array: Any, examples: int) -> Any:
    """Returns the mean of each example's elements."""
    return tf.reduce_mean(tf.reshape(array, (examples, -1)), axis=1)


def total(array: Any) -> Any:
    """Returns the sum of all elements."""
    return tf.reduce_sum(array)


def scale(array: Any, factor: Any) -> Any:
    """Returns array * factor, with the factor first rounded to the array's dtype."""
    return array * tf.cast(factor, array.dtype)


def divide(array: Any, by: Any) -> Any:
    """Returns array / by. If `by` is 0, divides by 1."""
    by = double(by)
    return array / tf.cast(tf.where(by != 0, by, 1), array.dtype)


def as_weight(value: Any) -> Any:
    """Returns a number by which a sum is divided, in float64."""
    return double(value)


def as_column(weights: Any, values: Any) -> Any:
    """Returns the weights in the shape (examples, 1, ...), in their own dtype."""
    return tf.reshape(weights, (-1, *[1] * (len(values.shape) - 1)))


def where(condition: Any, array: Any, other: Any) -> Any:
    """Returns `array` where the condition is true, else `other`, element by element; either may be a number."""
    return tf.where(condition, array, other)


def any_nonzero(array: Any) -> Any:
    """Returns whether any element is not 0; NaN counts as not 0."""
    return tf.reduce_any(array != 0)


def is_finite_nonzero(value: Any) -> Any:
    """Returns whether a scalar is finite and not 0."""
    return tf.math.is_finite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Returns whether the dtype is neither float32 nor float64: gradients of shorter floats are added in float32."""
    return bool(array.dtype not in (tf.float32, tf.float64))


def argmax(array: Any, axis: int) -> Any:
    """Returns the position of the largest element on an axis."""
    return tf.argmax(array, axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """Returns whether each label is among the `num` largest elements on the axis, by top_k on the last axis."""
    last = len(array.shape) - 1
    array = array if axis == last else tf.experimental.numpy.moveaxis(array, axis, last)
    return tf.reduce_any(equal(tf.math.top_k(array, num).indices, labels[..., tf.newaxis]), -1)


def equal(left: Any, right: Any) -> Any:
    """Compares elementwise, in the dtype of the left array."""
    return tf.equal(left, tf.cast(right, left.dtype))


def count_true(array: Any) -> Any:
    """Returns the number of true elements, in float64."""
    return tf.reduce_sum(double(array))


def join(parts: Iterable[tuple[Any, float]]) -> Any:
    """Returns one float64 vector of numbers and tensors, each multiplied by its factor."""
    vectors = [tf.reshape(double(value), (-1,)) * tf.constant(times, tf.float64) for value, times in parts]
    return tf.concat(vectors, axis=0)
