"""Reader processes, which run the script's code for the examples while training computes.

Reader processes are new interpreters, not forks. The input and the result of a map stage are passed through shared
memory. A thread that asks for examples waits until a reader process is free.
"""

import functools
import queue
from collections.abc import Sequence
from typing import Any, NoReturn

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
    """The reader processes that run the map stages of one pipeline."""

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
            self._pool = WorkerPool(share=descriptors)
            entries = [functools.partial(serve, message, shared.descriptor, own.descriptor) for own in self._regions]
            self._readers = [self._pool.start(f"reader {index}", entry) for index, entry in enumerate(entries)]
            for index, reader in enumerate(self._readers):
                reader.receive()  # it has unpacked the stages; after all have, `shared` can be closed
                self._idle.put(index)
        except BaseException:
            self.close()
            raise
        finally:
            shared.close()

    def run(self, number: int, below: Any, indices: Indices, epochs: Indices) -> Any:
        """Returns the result of `MapStage.run` of the stage with this number, run in a free reader process."""
        index = self._idle.get()
        region, reader = self._regions[index], self._readers[index]
        try:
            (message,) = shm.pack([(number, below, indices, epochs)], region)
            reader.send(message)
            # A copy, because the next call overwrites the region.
            return copy_arrays(shm.unpack(reader.receive(), region))
        finally:
            self._idle.put(index)

    @property
    def pids(self) -> list[int | None]:
        """The reader processes' ids, in order."""
        return [reader.pid for reader in self._readers]

    def close(self) -> None:
        """Ends the reader processes."""
        if hasattr(self, "_pool"):
            self._pool.close()
        for region in self._regions:
            region.close()


def pack_pipeline(value: Any, region: Region) -> bytes:
    """Returns a message with a pipeline, or a pipeline's stages, for another process; the region gets the arrays."""
    try:
        (message,) = shm.pack([value], region)
    except BatchError as error:
        cause = error.__cause__ or error
        raise BatchError(
            "The data set or a function given to .map cannot be pickled, so it cannot be sent to other processes, "
            f"which read the examples: {cause}. Open files in __getitem__ rather than in __init__, or use a "
            "DataLoader, which is read in the script's process."
        ) from error
    return message


def serve(message: bytes, shared: int, own: int, channel: Channel) -> NoReturn:
    """Runs the loop of a reader process: runs the map stage that each message asks for, until the channel closes."""
    region = Region(shared)
    stages: list[MapStage] = shm.unpack_private(message, region)
    region.close()
    examples = Region(own)
    for hooks in framework_hooks.list_imported():  # the frameworks that unpickling the stages has imported
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
