"""Sends input pipelines to the workers, each once.

A pipeline is sent with the first command that uses it, and has a number from then on. Its arrays are in one shared
memory segment that every worker maps; for an array in a file, only the file's name is sent. When the script has dropped
a pipeline, the workers drop it with the next command.
"""

import os
import weakref
from collections.abc import Set
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from lockstep.core.batches import Rows
from lockstep.data.reader_processes import pack_pipeline
from lockstep.launch import shm
from lockstep.launch.shm import Region


class SentPipeline(NamedTuple):
    """A pickled pipeline, and the process id and descriptor of the shared memory that has the pipeline's arrays."""

    message: bytes
    pid: int
    descriptor: int


class PipelineChanges(NamedTuple):
    """The pipelines that a worker lacks, and those that the script has dropped, by number."""

    new: dict[int, SentPipeline]
    gone: tuple[int, ...]


class PipelineSender:
    """Sends pipelines from the controller to the workers."""

    def __init__(self) -> None:
        self._counter = count()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sent: dict[int, tuple[Region, SentPipeline]] = {}
        weakref.finalize(self, _close, self._sent)

    def number(self, rows: Rows) -> Rows:
        """Returns the rows with their pipeline replaced by its number; a new pipeline is sent with the next command."""
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
            # Not a method of this object: the pipeline may outlive it, and must not keep it alive.
            weakref.finalize(rows.pipeline, _drop, number, self._sent)
        return replace(rows, pipeline=number)

    def list_changes(self, known: Set[int]) -> PipelineChanges:
        """Returns the changes after which a worker that has the `known` pipelines has exactly those in use."""
        sent = dict(self._sent)  # a pipeline that is garbage-collected meanwhile removes its entry
        new = {number: pipeline for number, (_, pipeline) in sent.items() if number not in known}
        return PipelineChanges(new, tuple(known - sent.keys()))

    def list_numbers(self) -> set[int]:
        """Returns the numbers of the pipelines in use."""
        return set(self._sent)

    def close(self) -> None:
        """Frees the shared memory of the pipelines."""
        _close(self._sent)
        self._numbers.clear()


class PipelineReceiver:
    """The pipelines that a worker has received."""

    def __init__(self) -> None:
        self._pipelines: dict[int, Any] = {}

    def __len__(self) -> int:
        """Returns the number of pipelines that the worker has."""
        return len(self._pipelines)

    def apply(self, changes: PipelineChanges) -> None:
        """Adds the new pipelines and removes those that were dropped, which also closes their readers."""
        for number in changes.gone:
            self._pipelines.pop(number, None)
        for number, sent in changes.new.items():
            if number not in self._pipelines:
                region = Region.open_from_process(sent.pid, sent.descriptor)
                self._pipelines[number] = shm.unpack_private(sent.message, region)
                region.close()

    def restore(self, rows: Rows) -> Rows:
        """Returns the rows with the number replaced by its pipeline."""
        return replace(rows, pipeline=self._pipelines[rows.pipeline])


def _drop(number: int, sent: dict[int, tuple[Region, SentPipeline]]) -> None:
    if number in sent:
        sent.pop(number)[0].close()


def _close(sent: dict[int, tuple[Region, SentPipeline]]) -> None:
    for region, _ in sent.values():
        region.close()
    sent.clear()
