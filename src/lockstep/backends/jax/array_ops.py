"""Array functions for JAX.

JAX's arrays are immutable, so every function returns a new array. A copy never shares memory with the original: the
script may donate one of them to a jitted function, which frees its memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

put: Any = jax.device_put


def copy(arrays: Sequence[Any], device: str) -> list[Any]:
    """Returns copies of the arrays on the device."""
    return [put(array, _get_device(device), may_alias=False) for array in arrays]


def cut(array: Any, where: Any, device: str) -> Any:
    """Returns a copy of the examples `array[where]` on the device."""
    return put(array[where], _get_device(device), may_alias=False)


def absent(array: Any) -> str:
    """Returns why this array has no value, e.g. because it is traced; an empty string if it has a value."""
    if isinstance(array, jax.core.Tracer):
        return "a traced array. Call it outside of jax.jit, jax.grad and jax.vmap, with their results"
    return "" if isinstance(array, jax.Array) else f"a {type(array).__name__}. Give a jax.Array"


def check(array: Any) -> str:
    """Returns why a sum cannot replace this array: it is on several devices. Returns an empty string if it can."""
    if len(array.devices()) > 1:
        return f"an array on {len(array.devices())} devices. Give one array per device"
    return ""


def add(left: Any, right: Any) -> Any:
    """Returns left + right, added by XLA on the left array's device."""
    return jax.numpy.add(left, put(right, _find_device(left)))


def widen(array: Any) -> Any:
    """Returns a copy in at least float32; a later step may donate the original's memory."""
    wide = "float32" if array.dtype.name in ("float16", "bfloat16") else array.dtype
    return jax.numpy.array(array, dtype=wide)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """Returns decay * average + (1 - decay) * value for every pair.

    Products and sums are separate executables, because XLA would fuse them into multiply-adds, which round once.
    """
    result: list[Any] = _add_each(*_scale_each(averages, values, decay, 1 - decay))
    return result


@jax.jit
def _scale_each(
    averages: Sequence[Any], values: Sequence[Any], decay: Any, complement: Any
) -> tuple[list[Any], list[Any]]:
    pairs = zip(averages, values, strict=True)
    return [each * decay for each in averages], [value.astype(average.dtype) * complement for average, value in pairs]


@jax.jit
def _add_each(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    return [one + other for one, other in zip(left, right, strict=True)]


def to_numpy(array: Any) -> Any:
    """Returns a numpy copy of the array."""
    return np.array(array)


def from_numpy(data: Any, like: Any) -> Any:
    """Returns a copy of a numpy array on the device of `like`."""
    # `may_alias=False` alone would still share the memory of the numpy array, so it is copied first.
    return put(np.array(data), _find_device(like), may_alias=False)


def write(value: Any, target: Any) -> Any:
    """Returns a copy of the value on the target's device, because JAX arrays cannot be written in place."""
    return put(value, _find_device(target), may_alias=False)


def _find_device(array: Any) -> Any:
    (device,) = array.devices()
    return device


def _get_device(name: str) -> Any:
    kind, _, index = name.partition(":")
    devices = jax.local_devices(backend=kind)
    # Only a CPU's index can be too large: JAX has one CPU device unless it is configured to have more.
    return devices[int(index) % len(devices)]


def is_array(value: Any) -> bool:
    """Returns whether this is a JAX array, traced or not."""
    return isinstance(value, jax.Array)


def as_array(value: Any) -> Any:
    """Returns the value as a JAX array."""
    return jnp.asarray(value)


def to_host(array: Any) -> Any:
    """Returns the elements as a numpy array; None if the array is traced."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def shape(array: Any) -> tuple[int, ...]:
    """Returns the shape of an array, which may be traced."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns the array's elements in another shape."""
    return array.reshape(shape)


def double(array: Any) -> Any:
    """Returns floats as they are and integers as the widest float; JAX has float64 only if the script enabled it."""
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(wide())


def cast_like(value: Any, array: Any) -> Any:
    """Returns the value in the dtype of `array`."""
    return jnp.asarray(value, array.dtype)


def average(array: Any) -> Any:
    """Returns the mean of all elements."""
    return jnp.mean(array)


def average_rows(array: Any, examples: int) -> Any:
    """Returns the mean of each example's elements."""
    return array.reshape(examples, -1).mean(1)


def total(array: Any) -> Any:
    """Returns the sum of all elements."""
    return jnp.sum(array)


def scale(array: Any, factor: Any) -> Any:
    """Returns array * factor, with the factor first rounded to the array's dtype."""
    return array * jnp.asarray(factor, array.dtype)


def divide(array: Any, by: Any) -> Any:
    """Returns array / by. If `by` is 0, divides by 1."""
    by = jnp.asarray(by)
    return array / jnp.where(by != 0, by, 1).astype(jnp.result_type(array))


def as_weight(value: Any) -> Any:
    """Returns example weights as an array, in their own dtype."""
    return jnp.asarray(value)


def as_column(weights: Any, values: Any) -> Any:
    """Returns the weights reshaped to (n, 1, …, 1), so that they broadcast over `values`; keeps their dtype."""
    return weights.reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """Returns `array` where the condition is true, else `other`, element by element."""
    return jnp.where(condition, array, other)


def any_nonzero(array: Any) -> Any:
    """Returns whether any element is not 0; NaN counts as not 0."""
    return jnp.any(array != 0)


def is_finite_nonzero(value: Any) -> Any:
    """Returns whether a scalar is finite and not 0."""
    return jnp.isfinite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Returns whether the dtype is neither float32 nor float64: gradients of shorter floats are added in float32."""
    return bool(array.dtype not in (jnp.float32, jnp.float64))


def argmax(array: Any, axis: int) -> Any:
    """Returns the position of the largest element on the axis."""
    return array.argmax(axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """Returns whether each label is among the `num` largest elements on the axis, by XLA's top_k on the last axis."""
    top = jax.lax.top_k(jnp.moveaxis(array, axis, -1), num)[1]
    return (top == labels[..., None]).any(-1)


def equal(left: Any, right: Any) -> Any:
    """Compares elementwise, in the wider dtype of both arrays."""
    return left == right


def count_true(array: Any) -> Any:
    """Returns the number of true elements as an integer."""
    return array.sum()


def wide() -> Any:
    """Returns the widest float dtype that is enabled in JAX: float64 with jax_enable_x64, else float32."""
    return jax.dtypes.canonicalize_dtype(float)
