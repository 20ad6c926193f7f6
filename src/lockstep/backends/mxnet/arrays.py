"""Arrays: what is done to MXNet's arrays here, the same for `mx.nd` and `mx.np`.

Lockstep itself computes with `mx.nd`, also where the script has called
`npx.set_np()`: an `mx.np` array is the same memory under another class. Every call
only tells the engine what to do; none but `array_of` waits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from lockstep.backends.base import Array

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def dtype_of(array: Any) -> str:
    """The type of an array or parameter by name."""
    return _name(array.dtype)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return "bfloat16" if np.dtype(dtype) == BFLOAT16 else str(np.dtype(dtype))


def accumulated(dtype: str) -> str:
    """The type in which leaves are added: float64 stays, smaller floats are added in float32."""
    if "float" not in dtype:
        return "int64"
    return "float64" if dtype == "float64" else "float32"


def classic(array: Any) -> Any:
    """The same memory as an `mx.nd` array."""
    return array.as_nd_ndarray() if isinstance(array, mx.np.ndarray) else array


def view(vector: Any, start: int, stop: int, shape: tuple[int, ...] | None = None) -> Any:
    """A part of a vector, in its memory."""
    part = vector._slice(start, stop)
    return part if shape is None else part.reshape(shape or (1,))


def flat(array: Any) -> Any:
    """The array as a vector, in its memory."""
    return classic(array).reshape((-1,))


def detached(value: Any) -> Any:
    """An array without the graph that it was computed in; anything else as it is."""
    return value.detach() if is_array(value) else value


def total(array: Any) -> Any:
    """The sum of all elements in float64, as a vector of one."""
    vector = flat(array)
    if vector.dtype != np.float64:
        vector = nd.cast(vector, dtype="float64")
    return vector if vector.shape == (1,) else nd.sum(vector, axis=0, keepdims=True)


@lru_cache(maxsize=1024)
def constant(values: tuple[float, ...], context: Any) -> Any:
    """These numbers in float64 on the context; nobody writes to them."""
    return nd.array(values, ctx=context, dtype="float64")


def joined(values: Sequence[Any], context: Any) -> list[Any]:
    """Numbers and vectors of float64 as vectors on the context, neighbouring numbers in one."""
    pieces: list[Any] = []
    numbers: tuple[float, ...] = ()
    for value in values:
        if isinstance(value, float | int):
            numbers += (value,)
        else:
            if numbers:
                pieces.append(constant(numbers, context))
            pieces.append(value)
            numbers = ()
    return [*pieces, constant(numbers, context)] if numbers else pieces


def is_array(value: Any) -> bool:
    """Whether this is one of MXNet's arrays, of either class."""
    return isinstance(value, NDArray)


def array_of(array: Any) -> Array:
    """A copy of the array in numpy."""
    dtype = dtype_of(array)
    data = classic(array).asnumpy()
    return Array(data.view(np.uint16).view(ml_dtypes.bfloat16) if dtype == "bfloat16" else data, dtype)


def fill(array: Any, value: Array) -> None:
    """Writes such bytes into an array."""
    own = classic(array)
    data = value.data.view(np.uint16).view(BFLOAT16) if value.dtype == "bfloat16" else value.data
    own[:] = nd.array(np.ascontiguousarray(data), ctx=own.ctx, dtype=data.dtype)
