"""TensorFlow's tensors and variables; only a variable can be written to."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def copy(array: Any, device: str) -> Any:
    """A variable, trained where the original is."""
    with tf.device(_device(device)):
        return tf.Variable(tf.convert_to_tensor(array), trainable=getattr(array, "trainable", True))


def cut(array: Any, where: Any, device: str) -> Any:
    """A copy of some examples."""
    with tf.device(_device(device)):
        return tf.identity(array[where])


def absent(array: Any) -> str:
    """A symbolic tensor has no value yet; a Keras variable has it in a TensorFlow one."""
    if not tf.executing_eagerly():
        return "a tensor inside of a tf.function. Call it outside, with what the function returns"
    if isinstance(array, tf.Tensor | tf.Variable | tf.IndexedSlices):
        return ""
    return f"a {type(array).__name__}. Give tensors and tf.Variables; a Keras variable has one as .value"


def check(array: Any) -> str:
    """A tensor is not written to, and a variable always can be."""
    return ""


def add(left: Any, right: Any) -> Any:
    """TensorFlow's addition on the left tensor's device; sparse gradients are added as dense ones."""
    with tf.device(left.device):
        return tf.add(tf.convert_to_tensor(left), tf.convert_to_tensor(right))


def widen(array: Any) -> Any:
    """A tensor with the present value, which a later write to the variable does not change."""
    with tf.device(array.device):
        return tf.cast(array, tf.float32) if array.dtype in (tf.float16, tf.bfloat16) else tf.identity(array)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """New tensors, each operation in a kernel of its own."""
    result = []
    for average, value in zip(averages, values, strict=True):
        with tf.device(average.device):
            newest = tf.cast(value, average.dtype)
            result.append(tf.add(tf.multiply(average, decay), tf.multiply(newest, 1 - decay)))
    return result


def to_numpy(array: Any) -> Any:
    """A copy on the host."""
    return np.array(array.numpy())


def from_numpy(data: Any, like: Any) -> Any:
    """A copy on the device."""
    with tf.device(like.device):
        return tf.identity(tf.convert_to_tensor(data))


def write(value: Any, target: Any) -> Any:
    """A variable in place; for a tensor a copy on its device."""
    if isinstance(target, tf.Variable):
        target.assign(value)
        return target
    with tf.device(target.device):
        return tf.identity(tf.convert_to_tensor(value))


def _device(name: str) -> str:
    kind, _, index = name.partition(":")
    found = tf.config.list_logical_devices(kind.upper())
    # A name beyond the last is only given to CPUs, of which TensorFlow has one unless told.
    return str(found[int(index) % len(found)].name)


def is_array(value: Any) -> bool:
    """Symbolic ones too."""
    return bool(tf.is_tensor(value))


def as_array(value: Any) -> Any:
    """As TensorFlow makes a tensor."""
    return tf.convert_to_tensor(value)


def to_host(array: Any) -> Any:
    """None of a symbolic tensor."""
    return array.numpy() if tf.executing_eagerly() else None


def shape(array: Any) -> tuple[int, ...]:
    """Of a symbolic tensor too."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """TensorFlow's."""
    return tf.reshape(array, shape)


def double(array: Any) -> Any:
    """float64; also of numbers."""
    return tf.cast(array, tf.float64)


def cast_like(value: Any, array: Any) -> Any:
    """In the type of the other."""
    return tf.cast(value, array.dtype)


def average(array: Any) -> Any:
    """TensorFlow's mean."""
    return tf.reduce_mean(array)


def average_rows(array: Any, examples: int) -> Any:
    """TensorFlow's mean of every row."""
    return tf.reduce_mean(tf.reshape(array, (examples, -1)), axis=1)


def total(array: Any) -> Any:
    """TensorFlow's sum."""
    return tf.reduce_sum(array)


def scale(array: Any, factor: Any) -> Any:
    """The factor is rounded first."""
    return array * tf.cast(factor, array.dtype)


def divide(array: Any, by: Any) -> Any:
    """By 1 instead of 0."""
    by = double(by)
    return array / tf.cast(tf.where(by != 0, by, 1), array.dtype)


def as_weight(value: Any) -> Any:
    """float64."""
    return double(value)


def as_column(weights: Any, values: Any) -> Any:
    """In their own type."""
    return tf.reshape(weights, (-1, *[1] * (len(values.shape) - 1)))


def where(condition: Any, array: Any, other: Any) -> Any:
    """One of the last two may be a number."""
    return tf.where(condition, array, other)


def any_nonzero(array: Any) -> Any:
    """NaN is not 0."""
    return tf.reduce_any(array != 0)


def is_finite_nonzero(value: Any) -> Any:
    """Of one number."""
    return tf.math.is_finite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Smaller floats are added in float32."""
    return bool(array.dtype not in (tf.float32, tf.float64))


def argmax(array: Any, axis: int) -> Any:
    """TensorFlow's argmax."""
    return tf.argmax(array, axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """TensorFlow's top_k, which knows the last axis alone."""
    last = len(array.shape) - 1
    array = array if axis == last else tf.experimental.numpy.moveaxis(array, axis, last)
    return tf.reduce_any(equal(tf.math.top_k(array, num).indices, labels[..., tf.newaxis]), -1)


def equal(left: Any, right: Any) -> Any:
    """In the left one's type."""
    return tf.equal(left, tf.cast(right, left.dtype))


def count_true(array: Any) -> Any:
    """In float64."""
    return tf.reduce_sum(double(array))


def join(parts: Iterable[tuple[Any, float]]) -> Any:
    """One float64 vector of numbers and tensors, each times a plain number."""
    vectors = [tf.reshape(double(value), (-1,)) * tf.constant(times, tf.float64) for value, times in parts]
    return tf.concat(vectors, axis=0)
