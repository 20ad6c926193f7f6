"""TensorFlow's tensors and variables; only a variable can be written to."""

from collections.abc import Sequence
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
