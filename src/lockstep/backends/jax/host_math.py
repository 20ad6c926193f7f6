"""Arithmetic on nodes in the host's memory: XLA's own, for it treats denormal numbers otherwise than numpy."""

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray


def add(left: NDArray[Any], right: NDArray[Any], device: Any) -> NDArray[Any]:
    """left + right, as the device adds."""
    return left + right if _hosts_own(left) else _run(_add, left, right, device)


def divide(vector: NDArray[Any], by: float, device: Any) -> NDArray[Any]:
    """vector / by, as the device divides."""
    divisor = np.full_like(vector, by)  # by one number, XLA would multiply by its reciprocal
    return vector / divisor if _hosts_own(vector) else _run(_divide, vector, divisor, device)


def _hosts_own(vector: NDArray[Any]) -> bool:
    """Whether JAX would not keep the type: the sums, where the script has no 64 bits."""
    return jax.dtypes.canonicalize_dtype(vector.dtype) != vector.dtype


def _run(operation: Any, left: NDArray[Any], right: NDArray[Any], device: Any) -> NDArray[Any]:
    return np.asarray(operation(*jax.device_put((left, right), device, may_alias=False)))


_add = jax.jit(lambda left, right: left + right)
_divide = jax.jit(lambda left, right: left / right)
