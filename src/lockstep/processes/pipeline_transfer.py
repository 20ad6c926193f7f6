"""Input pipelines on their way to the workers, each sent once.

A pipeline is sent with the first command that mentions it, and named by a number from then on. Its arrays lie in one
shared memory segment that every worker maps; arrays in files travel by the file's name. When the script has dropped a
pipeline, the next command tells the workers to drop it too.
"""

import os
import weakref
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from lockstep.core.batches import Rows
from lockstep.data.reader_processes import pack_pipeline
from lockstep.launch import shm
from lockstep.launch.shm import Region


class SentPipeline(NamedTuple):
    """A pickled pipeline, and the process and descriptor of the memory in which its arrays lie."""

    message: bytes
    pid: int
    descriptor: int


class PipelineChanges(NamedTuple):
    """The pipelines that are new or gone since the last command, by number."""

    new: dict[int, SentPipeline]
    gone: tuple[int, ...]


class PipelineSender:
    """The controller's end."""

    def __init__(self) -> None:
        self._counter = count()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sent: dict[int, tuple[Region, SentPipeline]] = {}
        self._new: list[int] = []
        self._gone: list[int] = []
        self._num_reported = 0  # of those that are gone
        weakref.finalize(self, _close, self._sent)

    def number(self, rows: Rows) -> Rows:
        """Return the rows with the number of their pipeline in its place."""
        number = self._numbers.get(rows.pipeline)
        if number is None:
            number = next(self._counter)
            region = Region.create("pipeline")
            try:
                message = pack_pipeline(rows.pipeline, region)
            except BaseException:
                region.close()
                raise
            self._numbers[rows.pipeline] = number
            self._sent[number] = region, SentPipeline(message, os.getpid(), region.descriptor)
            self._new.append(number)
            # Not a method of this object: the pipeline may outlive it, and must not keep it alive.
            weakref.finalize(rows.pipeline, _drop, number, self._sent, self._gone)
        return replace(rows, pipeline=number)

    def take_changes(self) -> PipelineChanges:
        """Return what has changed since the last call."""
        new = {number: self._sent[number][1] for number in self._new if number in self._sent}
        gone = tuple(self._gone[self._num_reported :])
        self._new, self._num_reported = [], self._num_reported + len(gone)
        return PipelineChanges(new, gone)

    def repeat(self) -> None:
        """Send everything once more with the next command: a worker may have missed the last one."""
        self._new, self._num_reported = list(self._sent), 0

    def close(self) -> None:
        """Let go of the memory."""
        _close(self._sent)
        self._numbers.clear()


class PipelineReceiver:
    """A worker's end: the pipelines it was sent, by number."""

    def __init__(self) -> None:
        self._pipelines: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of pipelines it has."""
        return len(self._pipelines)

    def apply(self, changes: PipelineChanges) -> None:
        """Take what is new and drop what is gone; readers end with their pipeline."""
        for number in changes.gone:
            self._pipelines.pop(number, None)
        for number, sent in changes.new.items():
            if number not in self._pipelines:
                region = Region.open_from_process(sent.pid, sent.descriptor)
                self._pipelines[number] = shm.unpack_private(sent.message, region)
                region.close()

    def restore(self, rows: Rows) -> Rows:
        """Return the rows with their pipeline in the place of its number."""
        return replace(rows, pipeline=self._pipelines[rows.pipeline])


def _drop(number: int, sent: dict[int, tuple[Region, SentPipeline]], gone: list[int]) -> None:
    if number in sent:
        sent.pop(number)[0].close()
        gone.append(number)


def _close(sent: dict[int, tuple[Region, SentPipeline]]) -> None:
    for region, _ in sent.values():
        region.close()
    sent.clear()
