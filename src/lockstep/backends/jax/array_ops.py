"""JAX's arrays, which nobody can write to: what the collectives give is always new.

A copy never shares memory with the original, so that donating one leaves the other.
"""

from collections.abc import Sequence
from typing import Any

import jax
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
