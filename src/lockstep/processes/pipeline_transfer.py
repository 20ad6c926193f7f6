"""Sends input pipelines to the workers, each once.

A pipeline is sent once, with the first command that mentions it, and is known by a
number from then on. Its arrays lie in one shared segment that every worker maps;
arrays in files travel by the file's name. When the script has let go of a pipeline,
the workers hear of it with the next command.
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


class Parcel(NamedTuple):
    """A pipeline, and who holds the memory in which its arrays lie."""

    message: bytes
    pid: int
    descriptor: int


class Freight(NamedTuple):
    """What has changed since the last command."""

    new: dict[int, Parcel]
    gone: tuple[int, ...]


class PipelineSender:
    """The controlling process's end."""

    def __init__(self) -> None:
        self._numbers = count()
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._regions: dict[int, tuple[Region, Parcel]] = {}
        self._new: list[int] = []
        self._gone: list[int] = []
        self._told = 0  # of those that are gone
        weakref.finalize(self, _close, self._regions)

    def numbered(self, rows: Rows) -> Rows:
        """The rows with the number of their pipeline in its place."""
        number = self._known.get(rows.pipeline)
        if number is None:
            number = next(self._numbers)
            region = Region.create("pipeline")
            try:
                message = pack_pipeline(rows.pipeline, region)
            except BaseException:
                region.close()
                raise
            self._known[rows.pipeline] = number
            self._regions[number] = region, Parcel(message, os.getpid(), region.descriptor)
            self._new.append(number)
            weakref.finalize(rows.pipeline, _drop, number, self._regions, self._gone)
        return replace(rows, pipeline=number)

    def freight(self) -> Freight:
        """What the workers do not know yet."""
        new = {number: self._regions[number][1] for number in self._new if number in self._regions}
        gone = tuple(self._gone[self._told :])
        self._new, self._told = [], self._told + len(gone)
        return Freight(new, gone)

    def again(self) -> None:
        """A worker may have missed the last freight: all of it goes once more."""
        self._new, self._told = list(self._regions), 0

    def close(self) -> None:
        """Lets go of the memory."""
        _close(self._regions)
        self._known.clear()


class PipelineReceiver:
    """A worker's end: the pipelines it was sent."""

    def __init__(self) -> None:
        self._pipelines: dict[int, Any] = {}

    def take(self, freight: Freight) -> None:
        """Takes what is new and drops what is gone; readers end with their pipeline."""
        for number in freight.gone:
            self._pipelines.pop(number, None)
        for number, sent in freight.new.items():
            if number not in self._pipelines:
                region = Region.open_from_process(sent.pid, sent.descriptor)
                self._pipelines[number] = shm.unpack_private(sent.message, region)
                region.close()

    def known(self, rows: Rows) -> Rows:
        """The rows with their pipeline."""
        return replace(rows, pipeline=self._pipelines[rows.pipeline])


def _drop(number: int, regions: dict[int, tuple[Region, Parcel]], gone: list[int]) -> None:
    if number in regions:
        regions.pop(number)[0].close()
        gone.append(number)


def _close(regions: dict[int, tuple[Region, Parcel]]) -> None:
    for region, _ in regions.values():
        region.close()
    regions.clear()
