"""Reader processes, which run the script's own code for the examples while training computes.

They are new interpreters, never forks. The input and result of a map stage go through shared memory. A thread that asks
for examples waits for a free reader process.
"""

import functools
import queue
from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from lockstep.core import framework_hooks
from lockstep.data.collate import copy_arrays
from lockstep.data.map_stage import MapStage
from lockstep.errors import BatchError, PlatformError
from lockstep.launch import remote_errors, shm
from lockstep.launch.channel import Channel
from lockstep.launch.shm import Region
from lockstep.launch.worker_pool import WorkerPool, require_linux

Indices = NDArray[np.int64]


class ReaderPool:
    """Reader processes for the map stages of one pipeline."""

    def __init__(self, stages: Sequence[MapStage], count: int) -> None:
        try:
            require_linux()
        except PlatformError as error:
            raise PlatformError(
                f"Reader processes need Linux 5.3 or later. {error} Use workers=0, and leave .prefetch out."
            ) from None
        shared = Region.create("stages")
        self._regions = [Region.create("examples") for _ in range(count)]
        descriptors = [shared.descriptor, *(region.descriptor for region in self._regions)]
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            message = pack_pipeline(list(stages), shared)
            self._workers = WorkerPool([f"reader {index}" for index in range(count)], share=descriptors)
            entries = (functools.partial(serve, message, shared.descriptor, own.descriptor) for own in self._regions)
            self._workers.start(cloudpickle.dumps(entry) for entry in entries)
            for index in range(count):
                self._workers.receive(index)  # it has unpacked the stages; after all have, `shared` can be closed
                self._idle.put(index)
        except BaseException:
            self.close()
            raise
        finally:
            shared.close()

    def run(self, number: int, below: Any, indices: Indices, epochs: Indices) -> Any:
        """Runs `MapStage.run` of the stage with this number in a free reader process."""
        index = self._idle.get()
        region = self._regions[index]
        try:
            (message,) = shm.pack([(number, below, indices, epochs)], region)
            self._workers.send(index, message)
            # A copy, because the next call overwrites the region.
            return copy_arrays(shm.unpack(self._workers.receive(index), region))
        finally:
            self._idle.put(index)

    def close(self) -> None:
        """Ends the reader processes."""
        if hasattr(self, "_workers"):
            self._workers.close()
        for region in self._regions:
            region.close()


def pack_pipeline(value: Any, region: Region) -> bytes:
    """Packs a pipeline, or the stages of one, for another process."""
    try:
        (message,) = shm.pack([value], region)
    except BatchError as error:
        cause = error.__cause__ or error
        raise BatchError(
            f"The data set or a function given to .map cannot be pickled, so it cannot be sent to the processes that "
            f"read: {cause}. Open files in __getitem__ rather than in __init__, or use a DataLoader, which is read in "
            "the script's own process."
        ) from error
    return message


def serve(message: bytes, shared: int, own: int, channel: Channel) -> NoReturn:
    """The main loop of a reader process."""
    region = Region(shared)
    stages: list[MapStage] = shm.unpack_private(message, region)
    region.close()
    examples = Region(own)
    for hooks in framework_hooks.list_imported():  # by unpickling the stages
        hooks.set_num_threads(1)
    channel.send(b"")
    while True:
        received = channel.receive()
        try:
            number, below, indices, epochs = copy_arrays(shm.unpack(received, examples))
            batch = stages[number].run(below, indices, epochs)
            (answer,) = shm.pack([batch], examples)
        except Exception as error:
            remote_errors.send_exception(channel, error)
        else:
            channel.send(answer)
