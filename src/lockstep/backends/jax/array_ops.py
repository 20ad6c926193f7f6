"""JAX's arrays, which cannot be written to: the collectives always return new ones.

A copy never shares memory with the original, so that donating one leaves the other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

put: Any = jax.device_put


def copy(array: Any, device: str) -> Any:
    """A copy that stays on the device; any array can be differentiated."""
    return put(array, _device(device), may_alias=False)


def cut(array: Any, where: Any, device: str) -> Any:
    """A copy of some examples."""
    return put(array[where], _device(device), may_alias=False)


def absent(array: Any) -> str:
    """A traced array has no value yet, a description of one never."""
    if isinstance(array, jax.core.Tracer):
        return "a traced array. Call it outside of jax.jit, jax.grad and jax.vmap, with their results"
    return "" if isinstance(array, jax.Array) else f"a {type(array).__name__}. Give a jax.Array"


def check(array: Any) -> str:
    """An array that is spread lies on no device."""
    if len(array.devices()) > 1:
        return f"an array that lies on {len(array.devices())} devices. Give one array per device"
    return ""


def add(left: Any, right: Any) -> Any:
    """XLA's addition on the left array's device."""
    return jax.numpy.add(left, put(right, _place(left)))


def widen(array: Any) -> Any:
    """A copy, so that a later step can take the memory of the original."""
    wide = "float32" if array.dtype.name in ("float16", "bfloat16") else array.dtype
    return jax.numpy.array(array, dtype=wide)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """All arrays in two executables: XLA would fuse products and sums of a single one into multiply-adds."""
    result: list[Any] = _add_each(*_scale_each(averages, values, decay, 1 - decay))
    return result


@jax.jit
def _scale_each(averages: Sequence[Any], values: Sequence[Any], decay: Any, rest: Any) -> tuple[list[Any], list[Any]]:
    pairs = zip(averages, values, strict=True)
    return [each * decay for each in averages], [value.astype(average.dtype) * rest for average, value in pairs]


@jax.jit
def _add_each(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    return [one + other for one, other in zip(left, right, strict=True)]


def to_numpy(array: Any) -> Any:
    """A copy on the host."""
    return np.array(array)


def from_numpy(data: Any, like: Any) -> Any:
    """A copy on the device."""
    return put(np.array(data), _place(like), may_alias=False)  # numpy's memory may be shared all the same


def write(value: Any, target: Any) -> Any:
    """A copy where the target lies."""
    return put(value, _place(target), may_alias=False)


def _place(array: Any) -> Any:
    (device,) = array.devices()
    return device


def _device(name: str) -> Any:
    kind, _, index = name.partition(":")
    found = jax.local_devices(backend=kind)
    # A name beyond the last is only given to CPUs, of which JAX has one unless told.
    return found[int(index) % len(found)]


def is_array(value: Any) -> bool:
    """Traced ones too."""
    return isinstance(value, jax.Array)


def as_array(value: Any) -> Any:
    """As JAX makes an array."""
    return jnp.asarray(value)


def to_host(array: Any) -> Any:
    """None of a traced array."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def shape(array: Any) -> tuple[int, ...]:
    """Of a traced array too."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """XLA's."""
    return array.reshape(shape)


def double(array: Any) -> Any:
    """Floats as they are: without 64 bits there is nothing wider. The host goes on in float64."""
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(wide())


def cast_like(value: Any, array: Any) -> Any:
    """In the type of the other."""
    return jnp.asarray(value, array.dtype)


def average(array: Any) -> Any:
    """XLA's mean."""
    return jnp.mean(array)


def average_rows(array: Any, examples: int) -> Any:
    """XLA's mean of every row."""
    return array.reshape(examples, -1).mean(1)


def total(array: Any) -> Any:
    """XLA's sum."""
    return jnp.sum(array)


def scale(array: Any, factor: Any) -> Any:
    """The factor is rounded first."""
    return array * jnp.asarray(factor, array.dtype)


def divide(array: Any, by: Any) -> Any:
    """By 1 instead of 0."""
    by = jnp.asarray(by)
    return array / jnp.where(by != 0, by, 1).astype(jnp.result_type(array))


def as_weight(value: Any) -> Any:
    """In its own type."""
    return jnp.asarray(value)


def as_column(weights: Any, values: Any) -> Any:
    """In their own type."""
    return weights.reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """XLA's choice."""
    return jnp.where(condition, array, other)


def any_nonzero(array: Any) -> Any:
    """NaN is not 0."""
    return jnp.any(array != 0)


def is_finite_nonzero(value: Any) -> Any:
    """Of one number."""
    return jnp.isfinite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Smaller floats are added in float32."""
    return bool(array.dtype not in (jnp.float32, jnp.float64))


def argmax(array: Any, axis: int) -> Any:
    """XLA's argmax."""
    return array.argmax(axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """XLA's top_k, which knows the last axis alone."""
    best = jax.lax.top_k(jnp.moveaxis(array, axis, -1), num)[1]
    return (best == labels[..., None]).any(-1)


def equal(left: Any, right: Any) -> Any:
    """In the wider type."""
    return left == right


def count_true(array: Any) -> Any:
    """In an integer type."""
    return array.sum()


def wide() -> Any:
    """The widest float that this script lets JAX compute in."""
    return jax.dtypes.canonicalize_dtype(float)
