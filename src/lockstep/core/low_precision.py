"""Conversion between the short float types and the type that numpy computes in.

numpy has no bfloat16, so its bytes are stored as int16. A bfloat16 is the upper half of a float32, so widening is
exact; narrowing rounds to the nearest, ties to even, as the frameworks do.
"""

from typing import Any

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
"""The type in which numpy computes with numbers of each floating type."""

QUIET = np.uint32(0x0040_0000)  # the quiet bit: keeps a truncated NaN a NaN
HALF = np.uint32(0x7FFF)  # just below half of the last bit that is kept
SHIFT = np.uint32(16)


def is_float(dtype: str) -> bool:
    """Returns whether this is a floating or complex type.

    >>> is_float("bfloat16"), is_float("float64"), is_float("int64")
    (True, True, False)
    """
    return dtype in WIDE


def widen(data: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Converts numbers to float32 or wider; returns an array that is wide enough itself.

    >>> widen(np.array([0x3FC0], "int16"), "bfloat16")
    array([1.5], dtype=float32)
    """
    if dtype == "bfloat16":
        bits = data.view(np.uint16).astype(np.uint32)
        bits <<= SHIFT  # in place, because numpy converts the result of an expression without axes to a scalar
        return bits.view(np.float32)
    return data.astype(WIDE[dtype], copy=False)


def narrow(data: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rounds numbers to type `dtype`, ties to even; numbers beyond its range become infinity.

    >>> [hex(bits) for bits in narrow(np.array([1.5, 1.00390625, 1.01171875], "float32"), "bfloat16")]
    ['0x3fc0', '0x3f80', '0x3f82']
    """
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return data.astype(dtype, copy=False)
    bits = np.array(data, np.float32, order="C").view(np.uint32)
    even = bits >> SHIFT & np.uint32(1)
    bits += np.where(np.isnan(data), np.uint32(0), HALF + even)
    bits |= np.where(np.isnan(data), QUIET, np.uint32(0))
    bits >>= SHIFT
    return bits.astype(np.uint16).view(np.int16)
