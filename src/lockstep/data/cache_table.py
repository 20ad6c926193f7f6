"""The table of a cache: one row of fixed size per example, and a mark for each row that is stored.

    [ header: structure of the columns | marks: one checksum per example | column | column ... ]

The header describes the structure of an example, so that a process that opens the memory, or a later run that opens the
file, can read it. A mark is the checksum of its row and is written after the row, so a row that was being written when
its process was killed does not match its mark.
"""

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches
from lockstep.data.pipeline_inputs import Arrays
from lockstep.errors import BatchError
from lockstep.launch.shm import PAGE, Region

Indices = NDArray[np.int64]
_HEADER_BYTES = 4 * PAGE
_MAGIC = b"lockstep cache 2\n"


class CacheTable:
    """The rows and marks of a cache, in shared memory or a mapped file."""

    def __init__(self, region: Region, num_examples: int, structure: Any) -> None:
        self.structure = structure
        self._num_examples = num_examples
        self._region = region
        self._columns: list[NDArray[Any]] = []
        starts, self.nbytes = _compute_layout(structure, num_examples)
        self._memory = region.view(self.nbytes)
        self._marks = np.frombuffer(self._memory, np.int64, num_examples, _HEADER_BYTES)  # 0: not stored
        offsets = iter(starts)
        self._pytree = _build(structure, lambda leaf: self._create_column(leaf, next(offsets)))
        self._arrays = Arrays(self._pytree)

    @classmethod
    def create(cls, region: Region, num_examples: int, identity: str, batch: Any) -> "CacheTable":
        """Creates a table for examples with the structure of `batch`; several processes may do this at once."""
        table = cls(region, num_examples, describe_structure(batch))
        write_header(region, Header(num_examples, identity, table.structure, None))
        return table

    @classmethod
    def open(cls, region: Region, num_examples: int, identity: str) -> "tuple[CacheTable, int | None] | None":
        """Returns the table of these examples in a region and its checksum; None if the region has no such table.

        The checksum, which is not verified here, is None if the table is incomplete.
        """
        header = read_header(region)
        if (
            header is None
            or header.structure is None
            or (header.num_examples, header.identity) != (num_examples, identity)
        ):
            return None
        if _compute_layout(header.structure, num_examples)[1] != region.nbytes:
            return None
        return cls(region, num_examples, header.structure), header.checksum

    def write_checksum(self, identity: str) -> None:
        """Writes the checksum of the table into its header, which marks the table as complete."""
        write_header(self._region, Header(self._num_examples, identity, self.structure, self.compute_checksum()))

    def find_missing(self, indices: Indices) -> Indices:
        """Returns, without duplicates, the given indices whose examples are not stored yet."""
        result: Indices = np.unique(indices[self._marks[indices] == 0])
        return result

    def put(self, indices: Indices, batch: Any) -> None:
        """Stores the examples of a batch under these indices."""
        structure = describe_structure(batch)
        if structure != self.structure:
            raise BatchError(
                "The examples of a cache must have equal types and shapes, but these differ: "
                f"{batches.describe(self._pytree)} and {batches.describe(batch)}. "
                "Make the examples equal with .map(...) before .cache, or leave .cache out."
            )
        values = [value for value in batches.leaves(batch) if batches.is_array(value)]
        for column, value in zip(self._columns, values, strict=True):
            column[indices] = value
        # The marks are written after the rows, because other processes read a row as soon as it has a mark.
        self._marks[indices] = [_compute_mark(values, row) for row in range(len(indices))]

    def get(self, indices: Indices) -> Any:
        """Returns a copy of the examples with these indices."""
        return self._arrays.gather(indices)

    def list_stored(self) -> Indices:
        """Returns the indices of the stored examples; removes the mark of each row that does not match its mark."""
        for row in np.flatnonzero(self._marks):
            if self._marks[row] != _compute_mark(self._columns, int(row)):
                self._marks[row] = 0
        return np.flatnonzero(self._marks)

    @property
    def is_complete(self) -> bool:
        """Whether every example is stored."""
        return bool(self._marks.all())

    def compute_checksum(self) -> int:
        """Returns the checksum of all marks and rows."""
        return zlib.crc32(self._memory[_HEADER_BYTES : self.nbytes])

    def _create_column(self, leaf: list[Any], start: int) -> NDArray[Any]:
        dtype, shape = leaf
        column = np.ndarray((self._num_examples, *shape), np.dtype(dtype), self._memory, start)
        self._columns.append(column)
        return column


class Header(NamedTuple):
    """The content of a table's header: the number, identity and structure of the examples, and a checksum."""

    num_examples: int
    identity: str  # of the examples
    structure: Any  # None if no example has been computed yet
    checksum: int | None  # None if the table is incomplete


def read_header(region: Region) -> Header | None:
    """Returns the header of the table in a region; None if the region has no valid header."""
    if region.nbytes < _HEADER_BYTES:
        return None
    memory = region.view(_HEADER_BYTES)
    length, check = (int.from_bytes(memory[start : start + 4], "little") for start in (len(_MAGIC), len(_MAGIC) + 4))
    text = bytes(memory[len(_MAGIC) + 8 : len(_MAGIC) + 8 + length])
    return Header(*json.loads(text)) if memory[: len(_MAGIC)] == _MAGIC and zlib.crc32(text) == check else None


def write_header(region: Region, header: Header) -> None:
    """Writes the header of a table into a region; raises if an example has too many arrays for the header."""
    text = json.dumps(header).encode()
    data = _MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    if len(data) > _HEADER_BYTES:
        raise BatchError(
            f"The examples have too many arrays for .cache: a description of the arrays needs {len(data)} bytes, and "
            f"the limit is {_HEADER_BYTES}. Concatenate some of the arrays with .map(...) before .cache."
        )
    region.view(_HEADER_BYTES)[: len(data)] = data


def describe_structure(batch: Any) -> Any:
    """Returns the structure of a batch's examples (tuples, dicts, dtypes, shapes) in a form that JSON can store."""
    if isinstance(batch, Mapping):
        return {"dict": [[key, describe_structure(value)] for key, value in batch.items()]}
    if isinstance(batch, tuple):
        return {"tuple": [describe_structure(value) for value in batch]}
    if batches.is_array(batch):
        return {"array": [batch.dtype.str, list(batch.shape[1:])]}
    if batch is None or isinstance(batch, bool | int | float | str):
        return {"value": batch}
    raise BatchError(
        f"A cache cannot store {batches.describe(batch)}, because its rows have a fixed size. "
        "Convert this value to arrays of numbers with .map(...) before .cache."
    )


def _compute_mark(columns: Sequence[NDArray[Any]], row: int) -> int:
    """Returns a checksum of a row's bytes that is never 0."""
    return 1 + functools.reduce(lambda number, column: zlib.crc32(column[row].tobytes(), number), columns, 0)


def _build(structure: Any, build_column: Any) -> Any:
    """Returns a pytree of this structure that has the result of `build_column` in place of each array."""
    ((kind, value),) = structure.items()
    if kind == "dict":
        return {key: _build(part, build_column) for key, part in value}
    if kind == "tuple":
        return tuple(_build(part, build_column) for part in value)
    return build_column(value) if kind == "array" else value


def _compute_layout(structure: Any, num_examples: int) -> tuple[list[int], int]:
    """Returns the byte offset of each column of a table, and the size of the table in bytes."""
    starts = []
    end = _round_up(_HEADER_BYTES + 8 * num_examples)

    def add_column(leaf: list[Any]) -> None:
        nonlocal end
        starts.append(end)
        end = _round_up(end + num_examples * int(np.prod(leaf[1], dtype=np.int64)) * np.dtype(leaf[0]).itemsize)

    _build(structure, add_column)
    return starts, end


def _round_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
