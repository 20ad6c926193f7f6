"""The inputs of a pipeline: arrays, a data set with an index, or a stream.

An input is a value object. An array in a file is mapped instead of loaded, and other processes get the name of the file
instead of the array.
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
from lockstep.data.collate import to_numpy
from lockstep.errors import BatchError

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Arrays:
    """An input that is a pytree of arrays; an example is the entries at one index along axis 0."""

    pytree: Any

    @cached_property
    def arrays(self) -> Any:
        """The pytree with numpy arrays; a file that was given as a path is mapped."""
        return batches.transform(self.pytree, _open)

    @property
    def num_examples(self) -> int:
        """The number of examples, which is the length of axis 0."""
        return batches.count(self.arrays)

    @property
    def is_mapped(self) -> bool:
        """Whether at least one of the arrays is a mapped file."""
        return any(find_mapped_file(value) is not None for value in batches.leaves(self.arrays))

    @property
    def description(self) -> str:
        """A text that identifies the arrays: types, shapes, and a checksum of the first and last example."""
        ends = self.gather(np.array([0, self.num_examples - 1]))
        types = [str(getattr(value, "dtype", "")) for value in batches.leaves(self.arrays)]
        return f"{batches.describe(self.arrays)} {types} {batches.fingerprint(ends)}"

    def gather(self, indices: Indices) -> Any:
        """Returns a copy of the examples with these indices."""
        first, last = int(indices[0]), int(indices[-1])
        is_range = last - first == len(indices) - 1 and bool((np.diff(indices) == 1).all())

        def gather_array(value: Any) -> Any:
            if isinstance(value, list):
                return [value[index] for index in indices]
            if not batches.is_array(value):
                return value
            if is_range:
                return np.array(value[first : last + 1])
            if value.flags.c_contiguous:
                return np.take(np.asarray(value), indices, axis=0)
            return np.asarray(value)[indices]  # np.take would first copy the whole array to make it contiguous

        return batches.transform(self.arrays, gather_array)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle, with mapped files by name and with contiguous arrays, which need no copy."""
        return {"pytree": batches.transform(self.arrays, _prepare_pickle)}


@dataclass(frozen=True, eq=False)
class Indexed:
    """An input that is a data set with `__len__` and `__getitem__`."""

    dataset: Any
    is_mapped = False

    @property
    def num_examples(self) -> int:
        """The length of the data set; raises BatchError if it is empty."""
        size = len(self.dataset)
        if size < 1:
            raise BatchError(f"The data set is an empty {type(self.dataset).__name__}. Use a data set with examples.")
        return size

    @property
    def description(self) -> str:
        """A text that identifies the data set, as far as possible without reading its examples."""
        return f"{type(self.dataset).__qualname__} of {self.num_examples}"


@dataclass(frozen=True, eq=False)
class Stream:
    """An input that is an iterable of examples without an index."""

    iterable: Iterable[Any]
    is_mapped = False
    num_examples = None
    description = "stream"

    @property
    def min_examples(self) -> int:
        """The length of the iterable, but at least 1; 1 if the iterable has no length."""
        return max(1, operator.length_hint(self.iterable, 1)) if hasattr(self.iterable, "__len__") else 1


Input = Arrays | Indexed | Stream


def _open(value: Any) -> Any:
    if isinstance(value, Path):
        return _check(np.load(value, mmap_mode="r"), str(value))
    value = to_numpy(value)
    return _check(value, type(value).__name__) if isinstance(value, np.ndarray) else value


def _check(array: NDArray[Any], name: str) -> NDArray[Any]:
    if array.ndim and not array.dtype.hasobject:
        return array
    raise BatchError(
        f"lockstep.data.arrays needs arrays with an axis 0 and with elements of fixed size. Got {name}, an array of "
        f"{array.dtype} of shape {array.shape}. Use numbers, booleans or fixed-size strings, or lockstep.data.indexed."
    )


def find_mapped_file(value: Any) -> "np.memmap[Any, Any] | None":
    """Returns the mapped file of which an array is a view; None if the array is in memory or mapped copy-on-write."""
    found = None
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap):
            found = value
        value = value.base
    return found if found is not None and found.filename is not None and found.mode != "c" else None


class _MappedReference:
    """What a pickle contains in place of a mapped array; unpickling it maps the file in the other process."""

    def __init__(self, array: NDArray[Any], file: "np.memmap[Any, Any]") -> None:
        offset = file.offset + get_address(array) - get_address(file)
        self._place = os.fspath(file.filename), array.dtype, array.shape, array.strides, offset  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _map, self._place


def _prepare_pickle(value: Any) -> Any:
    mapped_file = find_mapped_file(value)
    if mapped_file is not None:
        return _MappedReference(value, mapped_file)
    is_scattered = isinstance(value, np.ndarray) and not value.flags.forc
    return np.ascontiguousarray(value) if is_scattered else value


def _map(name: str, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> NDArray[Any]:
    # The file is mapped as bytes and the array is a view of them, because strides may be negative.
    return np.ndarray(shape, dtype, np.memmap(name, np.uint8, "r"), offset, strides)


def get_address(array: NDArray[Any]) -> int:
    """Returns the memory address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def compute_checksum(text: str) -> int:
    """Returns the CRC-32 of a text."""
    return zlib.crc32(text.encode())
