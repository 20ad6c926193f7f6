"""JAX's arrays, which nobody can write to: what the collectives give is always new.

A copy never shares memory with the original, so that donating one leaves the other.
"""

from typing import Any

import jax

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
