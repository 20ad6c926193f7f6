"""Converts arrays of bfloat16 and float16 to a type in which numpy computes, and back.

numpy has no bfloat16; `ml_dtypes` adds the type, which JAX and TensorFlow use on the host too. A bfloat16 is the upper
half of a float32, so widening is exact; narrowing rounds to the nearest value, ties to even, as the frameworks do.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

WIDE = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}
"""For each floating or complex type, the type in which numpy computes with its values."""


def is_float(dtype: str) -> bool:
    """Returns whether `dtype` is a floating or complex type.

    >>> is_float("bfloat16"), is_float("float64"), is_float("int64")
    (True, True, False)
    """
    return dtype in WIDE


def widen(data: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Returns the array as float32 or wider, without a copy if it is wide enough.

    >>> widen(np.array([1.5], ml_dtypes.bfloat16), "bfloat16")
    array([1.5], dtype=float32)
    """
    return data.astype(WIDE[dtype], copy=False)


def narrow(data: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Returns the array rounded to `dtype`, ties to even; values beyond its range become infinite.

    >>> narrow(np.array([1.5, 1.00390625, 1.01171875], "float32"), "bfloat16").tolist()
    [1.5, 1.0, 1.015625]
    """
    with np.errstate(over="ignore", invalid="ignore"):  # numpy would warn of a signaling NaN
        return data.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, copy=False)
