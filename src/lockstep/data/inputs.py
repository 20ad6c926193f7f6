"""Bases: where the examples of a pipeline lie.

A base is a value. An array in a file stays there: it is mapped, never loaded, and
travels to another process by the file's name.
"""

import operator
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches
from lockstep.data.collate import plain
from lockstep.errors import BatchError

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Arrays:
    """A nest of arrays, gathered by index on axis 0."""

    nest: Any

    @cached_property
    def opened(self) -> Any:
        """The nest as numpy has it, with files mapped."""
        return batches.transform(self.nest, _opened)

    @property
    def num_examples(self) -> int:
        """The length of axis 0."""
        return batches.count(self.opened)

    @property
    def mapped(self) -> bool:
        """Whether some of it lies in files."""
        return any(root(value) is not None for value in batches.leaves(self.opened))

    @property
    def form(self) -> str:
        """What tells these arrays from others: types, shapes, and the bytes of two examples."""
        ends = self.gather(np.array([0, self.num_examples - 1]))
        types = [str(getattr(value, "dtype", "")) for value in batches.leaves(self.opened)]
        return f"{batches.describe(self.opened)} {types} {batches.fingerprint(ends)}"

    def gather(self, indices: Indices) -> Any:
        """A fresh copy of these rows."""
        first, last = int(indices[0]), int(indices[-1])
        whole = last - first == len(indices) - 1 and bool((np.diff(indices) == 1).all())

        def leaf(value: Any) -> Any:
            if isinstance(value, list):
                return [value[index] for index in indices]
            if not batches.is_array(value):
                return value
            if whole:
                return np.array(value[first : last + 1])
            if value.flags.c_contiguous:
                return np.take(np.asarray(value), indices, axis=0)
            return np.asarray(value)[indices]  # `take` would make a contiguous copy of all of it first

        return batches.transform(self.opened, leaf)

    def __getstate__(self) -> dict[str, Any]:
        """Files by name; arrays in memory as numpy has them, in one piece, so that they need not be copied."""
        return {"nest": batches.transform(self.opened, _travelling)}


@dataclass(frozen=True, eq=False)
class Indexed:
    """Anything with a length and examples by index."""

    dataset: Any
    mapped = False

    @property
    def num_examples(self) -> int:
        """The data set's length."""
        size = len(self.dataset)
        if size < 1:
            raise BatchError(f"A data set holds at least one example. Got {type(self.dataset).__name__} of length 0.")
        return size

    @property
    def form(self) -> str:
        """What tells this data set from another, as far as that is known without reading it."""
        return f"{type(self.dataset).__qualname__} of {self.num_examples}"


@dataclass(frozen=True, eq=False)
class Stream:
    """Examples one after another, as an iterable gives them."""

    iterable: Iterable[Any]
    mapped = False
    num_examples = None
    form = "stream"

    @property
    def least(self) -> int:
        """How many examples it gives at least, as far as that is known without reading it."""
        return max(1, operator.length_hint(self.iterable, 1)) if hasattr(self.iterable, "__len__") else 1


Base = Arrays | Indexed | Stream


def _opened(value: Any) -> Any:
    if isinstance(value, Path):
        return _checked(np.load(value, mmap_mode="r"), str(value))
    value = plain(value)
    return _checked(value, type(value).__name__) if isinstance(value, np.ndarray) else value


def _checked(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.ndim and not array.dtype.hasobject:
        return array
    raise BatchError(
        f"An array of examples has an axis to count them and a type of fixed size. Got {array.dtype} of shape "
        f"{array.shape} in {name}. Give numbers, booleans or fixed-size strings, or use lockstep.data.indexed."
    )


def root(value: Any) -> "np.memmap[Any, Any] | None":
    """The mapped file that the array is a view of; None where it lies in memory or its changes are private."""
    found = None
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap):
            found = value
        value = value.base
    return found if found is not None and found.filename is not None and found.mode != "c" else None


class _Travelling:
    """A mapped array on its way; unpickled, it is the array, mapped there."""

    def __init__(self, array: NDArray[Any], file: "np.memmap[Any, Any]") -> None:
        offset = file.offset + address(array) - address(file)
        self._place = os.fspath(file.filename), array.dtype, array.shape, array.strides, offset  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, self._place


def _travelling(value: Any) -> Any:
    mapped = root(value)
    if mapped is not None:
        return _Travelling(value, mapped)
    scattered = isinstance(value, np.ndarray) and not value.flags.forc
    return np.ascontiguousarray(value) if scattered else value


def _mapped(name: str, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> NDArray[Any]:
    # Strides may run backwards: the file is mapped as bytes, and the array is a view of them.
    return np.ndarray(shape, dtype, np.memmap(name, np.uint8, "r"), offset, strides)


def address(array: NDArray[Any]) -> int:
    """Where its first entry lies."""
    return int(array.__array_interface__["data"][0])


def checksum(text: str) -> int:
    """A short number for a long text."""
    return zlib.crc32(text.encode())
