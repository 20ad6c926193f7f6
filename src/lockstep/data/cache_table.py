"""A table: the examples of a cache, each in a row of one size, with a mark for each row that is there.

    [ head: what the columns are | marks: a number for each example | column | column ... ]

The head tells the form of an example, so any process that opens the memory, or a
later run that opens the file, knows what it holds. A mark is made of the row's bytes, and
written after them: a row that a crash has torn is known by it.
"""

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches
from lockstep.data.inputs import Arrays
from lockstep.errors import BatchError
from lockstep.exchange.region import PAGE, Region

Indices = NDArray[np.int64]
_HEAD = 4 * PAGE
_MAGIC = b"lockstep cache 2\n"


class Table:
    """Columns and marks over shared memory."""

    def __init__(self, region: Region, num_examples: int, form: Any) -> None:
        self.form = form
        self._num_examples = num_examples
        self._region = region
        self._columns: list[NDArray[Any]] = []
        starts, self.nbytes = _layout(form, num_examples)
        self._memory = region.view(self.nbytes)
        self._marks = np.frombuffer(self._memory, np.int64, num_examples, _HEAD)  # 0: not there
        places = iter(starts)
        self._nest = _built(form, lambda leaf: self._column(leaf, next(places)))
        self._arrays = Arrays(self._nest)

    @classmethod
    def begin(cls, region: Region, num_examples: int, identity: str, batch: Any) -> "Table":
        """A table for examples like those of the batch. Others may begin the same one at the same time."""
        table = cls(region, num_examples, form_of(batch))
        write_head(region, Head(num_examples, identity, table.form, None))
        return table

    @classmethod
    def find(cls, region: Region, num_examples: int, identity: str) -> "tuple[Table, int | None] | None":
        """The table of these examples in a region, and its checksum where it is whole; None where there is none."""
        head = read_head(region)
        if head is None or head.form is None or (head.num_examples, head.identity) != (num_examples, identity):
            return None
        if _layout(head.form, num_examples)[1] != region.nbytes:
            return None
        return cls(region, num_examples, head.form), head.checksum

    def seal(self, identity: str) -> None:
        """Writes down that it is whole."""
        write_head(self._region, Head(self._num_examples, identity, self.form, self.checksum()))

    def missing(self, indices: Indices) -> Indices:
        """Those of the examples that are not there yet, each once."""
        result: Indices = np.unique(indices[self._marks[indices] == 0])
        return result

    def put(self, indices: Indices, batch: Any) -> None:
        """Fills rows."""
        form = form_of(batch)
        if form != self.form:
            raise BatchError(
                "The examples of a cache have one form. "
                f"Got {batches.describe(self._nest)} and {batches.describe(batch)}, types included. "
                "Make them alike with .map(...) before .cache, or leave .cache out."
            )
        values = [value for value in batches.leaves(batch) if batches.is_array(value)]
        for column, value in zip(self._columns, values, strict=True):
            column[indices] = value
        self._marks[indices] = [_mark(values, place) for place in range(len(indices))]  # now others read them

    def get(self, indices: Indices) -> Any:
        """A fresh copy of these rows."""
        return self._arrays.gather(indices)

    def marked(self) -> Indices:
        """The examples that are there; one whose row has other bytes than its mark says is not, from now on."""
        for place in np.flatnonzero(self._marks):
            if self._marks[place] != _mark(self._columns, int(place)):
                self._marks[place] = 0
        return np.flatnonzero(self._marks)

    @property
    def whole(self) -> bool:
        """Whether every row is there."""
        return bool(self._marks.all())

    def checksum(self) -> int:
        """A number for all marks and rows."""
        return zlib.crc32(self._memory[_HEAD : self.nbytes])

    def _column(self, leaf: list[Any], start: int) -> NDArray[Any]:
        dtype, shape = leaf
        column = np.ndarray((self._num_examples, *shape), np.dtype(dtype), self._memory, start)
        self._columns.append(column)
        return column


class Head(NamedTuple):
    """What a table says of itself."""

    num_examples: int
    identity: str  # of the examples
    form: Any  # None: it has no rows yet
    checksum: int | None  # None: it is not whole


def read_head(region: Region) -> Head | None:
    """What the table in a region says of itself; None where that is nothing."""
    if region.nbytes < _HEAD:
        return None
    memory = region.view(_HEAD)
    length, check = (int.from_bytes(memory[start : start + 4], "little") for start in (len(_MAGIC), len(_MAGIC) + 4))
    text = bytes(memory[len(_MAGIC) + 8 : len(_MAGIC) + 8 + length])
    return Head(*json.loads(text)) if memory[: len(_MAGIC)] == _MAGIC and zlib.crc32(text) == check else None


def write_head(region: Region, head: Head) -> None:
    """Writes what a table is."""
    text = json.dumps(head).encode()
    data = _MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
    if len(data) > _HEAD:
        raise BatchError(
            "A cached example has at most some hundred arrays. Got more. Put them together with .map(...)."
        )
    region.view(_HEAD)[: len(data)] = data


def form_of(batch: Any) -> Any:
    """What JSON can say of an example: tuples, dicts, types and shapes."""
    if isinstance(batch, Mapping):
        return {"dict": [[key, form_of(value)] for key, value in batch.items()]}
    if isinstance(batch, tuple):
        return {"tuple": [form_of(value) for value in batch]}
    if batches.is_array(batch):
        return {"array": [batch.dtype.str, list(batch.shape[1:])]}
    if batch is None or isinstance(batch, bool | int | float | str):
        return {"value": batch}
    raise BatchError(
        "A cache holds arrays of numbers, and tuples and dicts of them, for their rows have one size. "
        f"Got {batches.describe(batch)}. Turn it into arrays with .map(...) before .cache."
    )


def _mark(columns: Sequence[NDArray[Any]], place: int) -> int:
    """A number for a row's bytes, never 0."""
    return 1 + functools.reduce(lambda number, column: zlib.crc32(column[place].tobytes(), number), columns, 0)


def _built(form: Any, column: Any) -> Any:
    """The nest of a form, with `column` of every array."""
    ((kind, value),) = form.items()
    if kind == "dict":
        return {key: _built(part, column) for key, part in value}
    if kind == "tuple":
        return tuple(_built(part, column) for part in value)
    return column(value) if kind == "array" else value


def _layout(form: Any, num_examples: int) -> tuple[list[int], int]:
    """Where each column starts, and the size of everything."""
    starts = []
    end = _up(_HEAD + 8 * num_examples)

    def place(leaf: list[Any]) -> None:
        nonlocal end
        starts.append(end)
        end = _up(end + num_examples * int(np.prod(leaf[1], dtype=np.int64)) * np.dtype(leaf[0]).itemsize)

    _built(form, place)
    return starts, end


def _up(place: int) -> int:
    return -(-place // PAGE) * PAGE
