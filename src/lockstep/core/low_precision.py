"""Bfloats: the short float types, to a type that numpy computes in and back.

numpy has no bfloat16: its bytes travel as int16. A bfloat16 is the upper half of a
float32, so widening is exact; narrowing rounds to the nearest, ties to even, as
the frameworks do.
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
"""The type in which numbers of a floating type are computed."""

QUIET = np.uint32(0x0040_0000)  # the bit that keeps a NaN one whose other bits are cut off
HALF = np.uint32(0x7FFF)  # just below half of the last bit that stays
SHIFT = np.uint32(16)


def is_float(dtype: str) -> bool:
    """Whether arrays of this type hold numbers that can be averaged.

    >>> is_float("bfloat16"), is_float("float64"), is_float("int64")
    (True, True, False)
    """
    return dtype in WIDE


def widen(data: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The same numbers in float32 or wider; an array that is wide enough is given back itself.

    >>> widen(np.array([0x3FC0], "int16"), "bfloat16")
    array([1.5], dtype=float32)
    """
    if dtype == "bfloat16":
        bits = data.view(np.uint16).astype(np.uint32)
        bits <<= SHIFT  # in place, for numpy makes a scalar of an expression without axes
        return bits.view(np.float32)
    return data.astype(WIDE[dtype], copy=False)


def narrow(data: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The nearest numbers of type `dtype`, ties to even; beyond its range, infinity.

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
