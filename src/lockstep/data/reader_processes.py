"""A pool: reader processes, in which the script's own code makes examples ahead of time.

Fresh interpreters, never a fork. What a segment works on, and what it gives, goes
through shared memory. A thread that asks waits for a reader that is free.
"""

import functools
import queue
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from lockstep.data.collate import copied
from lockstep.data.map_stage import Segment
from lockstep.errors import BatchError, PlatformError
from lockstep.exchange import parcel
from lockstep.exchange.region import Region
from lockstep.launch import remote_errors
from lockstep.launch.channel import Channel
from lockstep.launch.worker_pool import WorkerPool, require_linux

Indices = NDArray[np.int64]


class Pool:
    """Readers that run the segments of one pipeline."""

    def __init__(self, segments: Sequence[Segment], count: int) -> None:
        try:
            require_linux()
        except PlatformError as error:
            raise PlatformError(
                f"Reader processes need Linux 5.3 or later. {error} Use workers=0, and leave .prefetch out."
            ) from None
        shared = Region.create("segments")
        self._regions = [Region.create("examples") for _ in range(count)]
        descriptors = [shared.descriptor, *(region.descriptor for region in self._regions)]
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            message = packed(list(segments), shared)
            self._workers = WorkerPool([f"reader {index}" for index in range(count)], share=descriptors)
            entries = (functools.partial(serve, message, shared.descriptor, own.descriptor) for own in self._regions)
            self._workers.start(cloudpickle.dumps(entry) for entry in entries)
            for index in range(count):
                self._workers.receive(index)  # each has its segments: the shared memory may go
                self._idle.put(index)
        except BaseException:
            self.close()
            raise
        finally:
            shared.close()

    def run(self, number: int, below: Any, indices: Indices, epochs: Indices) -> Any:
        """What `Segment.run` gives."""
        index = self._idle.get()
        region = self._regions[index]
        try:
            (message,) = parcel.pack([(number, below, indices, epochs)], region)
            self._workers.send(index, message)
            return copied(parcel.unpack(self._workers.receive(index), region))
        finally:
            self._idle.put(index)

    def close(self) -> None:
        """Ends the readers."""
        if hasattr(self, "_workers"):
            self._workers.close()
        for region in self._regions:
            region.close()


def packed(value: Any, region: Region) -> bytes:
    """A pipeline, or the work of one, for another process."""
    try:
        (message,) = parcel.pack([value], region)
    except BatchError as error:
        cause = error.__cause__ or error
        raise BatchError(
            f"A data set, and what is given to .map, travel to the processes that read by pickle. This one does not: "
            f"{cause}. Open files in __getitem__ rather than in __init__, or give a DataLoader, which is read in the "
            "script's own process."
        ) from error
    return message


def serve(message: bytes, shared: int, own: int, link: Channel) -> NoReturn:
    """What a reader does from its first to its last breath."""
    region = Region(shared)
    segments: list[Segment] = parcel.keep(message, region)
    region.close()
    examples = Region(own)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    link.send(b"")
    while True:
        received = link.receive()
        try:
            number, below, indices, epochs = copied(parcel.unpack(received, examples))
            batch = segments[number].run(below, indices, epochs)
            (answer,) = parcel.pack([batch], examples)
        except Exception as error:
            remote_errors.report(link, error)
        else:
            link.send(answer)
