"""Readers: those that one process holds open, one for each pipeline it is asked to read."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.core.batches import Rows
from lockstep.data.reader import Reader

_Open = weakref.WeakKeyDictionary[Any, tuple[Reader, "weakref.finalize[..., Any]"]]


class Readers:
    """Opens a reader with the first rows of a pipeline; closes it when the pipeline is gone, or with `close`."""

    def __init__(self, stage: Callable[[Any], Any] = lambda piece: piece, place: tuple[int, int] = (0, 1)) -> None:
        self._stage = stage
        self._place = place
        self._open: _Open = weakref.WeakKeyDictionary()
        weakref.finalize(self, _close, self._open)

    def read(self, pieces: Sequence[Rows]) -> list[Any]:
        """The arrays of each piece; all pieces are of one pipeline."""
        pipeline = pieces[0].pipeline
        if pipeline not in self._open:
            reader = Reader(pipeline.chain, self._stage, self._place)
            self._open[pipeline] = reader, weakref.finalize(pipeline, reader.close)
        return self._open[pipeline][0].read(pieces)

    def close(self) -> None:
        """Closes every reader. Idempotent; a later read opens a new one."""
        _close(self._open)


def _close(readers: "_Open") -> None:
    for _, finalizer in list(readers.values()):
        finalizer()
    readers.clear()
