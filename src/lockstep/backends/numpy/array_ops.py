"""NumPy's arrays: the collectives' reference. Every device is the CPU."""

from typing import Any

import numpy as np


def copy(array: Any, device: str) -> Any:
    """A contiguous copy."""
    return np.array(array, order="C")


def cut(array: Any, where: Any, device: str) -> Any:
    """A contiguous copy of some examples."""
    return np.array(array[where], order="C")


def absent(array: Any) -> str:
    """Every array has its values."""
    return ""


def check(array: Any) -> str:
    """Others' memory is not written to."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return "an array that is read-only. Give its .copy()"
    return ""


def add(left: Any, right: Any) -> Any:
    """NumPy's addition."""
    return np.add(left, right)


def write(value: Any, target: Any) -> Any:
    """In place; a scalar is nobody's memory."""
    if not isinstance(target, np.ndarray):
        return value
    target[...] = value
    return target
