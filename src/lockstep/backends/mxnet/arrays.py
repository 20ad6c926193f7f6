"""Operations on MXNet's arrays that are the same for `mx.nd` and `mx.np`.

Lockstep computes with `mx.nd` even if the script has called `npx.set_np()`: an `mx.np` array is the same memory in
another class. The functions only queue operators in MXNet's engine; only `to_array` waits for a result.
"""

from functools import lru_cache
from typing import Any

import ml_dtypes
import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from lockstep.core.types import Array

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def get_dtype(array: Any) -> str:
    """Returns the name of the dtype of an array or parameter."""
    return _name_dtype(array.dtype)


@lru_cache(maxsize=64)
def _name_dtype(dtype: Any) -> str:
    return "bfloat16" if np.dtype(dtype) == BFLOAT16 else str(np.dtype(dtype))


def choose_sum_dtype(dtype: str) -> str:
    """Returns the dtype in which gradients are added: float64 for float64, float32 for all other floats."""
    if "float" not in dtype:
        return "int64"
    return "float64" if dtype == "float64" else "float32"


def as_nd(array: Any) -> Any:
    """Returns an `mx.nd` array with the same memory."""
    return array.as_nd_ndarray() if isinstance(array, mx.np.ndarray) else array


def view(vector: Any, start: int, stop: int, shape: tuple[int, ...] | None = None) -> Any:
    """Returns the elements from `start` to `stop` of a vector as a view, in this shape if given."""
    part = vector._slice(start, stop)
    return part if shape is None else part.reshape(shape or (1,))


def flatten(array: Any) -> Any:
    """Returns a view of the array as a vector."""
    return as_nd(array).reshape((-1,))


def detach(value: Any) -> Any:
    """Returns an array detached from its graph, and any other value as it is."""
    return value.detach() if is_array(value) else value


def sum_all(array: Any) -> Any:
    """Returns the sum of all elements in float64, as a vector of length 1."""
    vector = flatten(array)
    if vector.dtype != np.float64:
        vector = nd.cast(vector, dtype="float64")
    return vector if vector.shape == (1,) else nd.sum(vector, axis=0, keepdims=True)


def copy_double(value: Any) -> Any:
    """Returns a float64 copy of an array on its context, or of numbers on the host."""
    return as_nd(value).astype("float64") if is_array(value) else np.array(value, "float64")


def is_array(value: Any) -> bool:
    """Returns whether this is an array of `mx.nd` or `mx.np`."""
    return isinstance(value, NDArray)


def to_array(array: Any) -> Array:
    """Returns a copy of an array in the form that a state stores."""
    dtype = get_dtype(array)
    data = as_nd(array).asnumpy()
    return Array(data.view(np.uint16).view(ml_dtypes.bfloat16) if dtype == "bfloat16" else data, dtype)


def fill(array: Any, value: Array) -> None:
    """Writes one of a state's values into an array."""
    own = as_nd(array)
    data = value.data.view(np.uint16).view(BFLOAT16) if value.dtype == "bfloat16" else value.data
    own[:] = nd.array(np.ascontiguousarray(data), ctx=own.ctx, dtype=data.dtype)
