"""Anonymous shared memory (memfd) and pickles whose arrays are stored in it.

A region is a memfd. Workers inherit its descriptor, or open it through /proc while the process that created it keeps it
open. It has no name that could be left behind or opened by another user, and the kernel frees it when the last process
closes it. It grows on demand, and only pages that were written use memory. A file can be mapped in the same way.

`pack` writes the arrays of an object into a region; only the small rest of the pickle is sent through the channel, and
`unpack` reads the arrays in place. Both ends are processes of the same run, so the pickle is trusted.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from lockstep.errors import BatchError, PlatformError, WorkerError
from lockstep.launch.deferred_signals import defer_all_interrupts

PAGE = 4096
_ALIGNMENT = 64


class Region:
    """Shared memory behind one descriptor, which each process maps separately."""

    def __init__(self, descriptor: int, writable: bool = True) -> None:
        self.descriptor = descriptor
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._view = memoryview(b"")

    @classmethod
    def create(cls, name: str) -> "Region":
        """Creates an empty region. `name` is only shown in /proc."""
        if not hasattr(os, "memfd_create"):
            raise PlatformError(
                "Replicas in several processes need Linux's memfd_create, which this platform does not have. "
                "Use devices=1."
            )
        with defer_all_interrupts():  # until the descriptor has an owner
            return cls(os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC))

    @classmethod
    def open_from_process(cls, pid: int, descriptor: int) -> "Region":
        """Opens a region whose descriptor another process of the same user has open."""
        try:
            return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise WorkerError(
                f"Cannot open the shared memory of process {pid}: {error}. Check that /proc is mounted and that the "
                "process still runs, as the same user."
            ) from error

    @property
    def nbytes(self) -> int:
        """The current size of the region, which another process may have changed."""
        return os.fstat(self.descriptor).st_size

    def view(self, nbytes: int) -> memoryview:
        """Returns a shared view of at least `nbytes`; a smaller region grows.

        An earlier, smaller view stays valid and shows the same memory.
        """
        if len(self._view) < nbytes:
            size = max(-(-nbytes // PAGE) * PAGE, self.nbytes)
            if self.nbytes < size:
                os.ftruncate(self.descriptor, size)
            self._view = memoryview(mmap.mmap(self.descriptor, size, mmap.MAP_SHARED, self._protection))
        return self._view

    def view_private(self, nbytes: int) -> memoryview:
        """Returns a copy-on-write view of the first `nbytes`: other processes do not see what is written to it."""
        return memoryview(mmap.mmap(self.descriptor, max(nbytes, 1), mmap.MAP_PRIVATE))

    def close(self) -> None:
        """Closes the descriptor; the kernel frees the memory once its last view is gone."""
        self._view = memoryview(b"")
        self._finalizer()


def pack(values: Sequence[Any], region: Region) -> list[bytes]:
    """Returns one message per value, with the arrays of all values stored one after another in the region."""
    messages = []
    buffers: list[list[pickle.PickleBuffer]] = []
    for value in values:
        out_of_band: list[pickle.PickleBuffer] = []
        messages.append(_dump(value, out_of_band))
        buffers.append(out_of_band)
    raws = [[buffer.raw() for buffer in group] for group in buffers]
    memory = region.view(sum(raw.nbytes + _ALIGNMENT for group in raws for raw in group))
    start = 0
    result = []
    for message, group in zip(messages, raws, strict=True):
        places = []
        for raw in group:
            memory[start : start + raw.nbytes] = raw
            places.append((start, raw.nbytes))
            start += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        result.append(pickle.dumps((message, places)))
    return result


def unpack(message: bytes, region: Region) -> Any:
    """Returns the value of a message. Its arrays are read-only views of the region, until the next `pack` into it."""
    return _load(message, lambda nbytes: region.view(nbytes).toreadonly())


def unpack_private(message: bytes, region: Region) -> Any:
    """Returns the value of a message with writable arrays: pages are copied on write, the others stay shared."""
    return _load(message, region.view_private)


def _dump(value: Any, out_of_band: list[pickle.PickleBuffer]) -> bytes:
    try:
        # cloudpickle, because the script's own classes are pickled by value: a worker does not import the script.
        data: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=out_of_band.append)
    except Exception as error:
        raise BatchError(
            f"Something in the batch cannot be pickled, so it cannot be sent to a worker: {error}. Use arrays, "
            "numbers, strings and lists of these; or devices=1."
        ) from error
    return data


def _load(message: bytes, view: Callable[[int], memoryview]) -> Any:
    body, places = pickle.loads(message)
    if not places:
        return pickle.loads(body)
    memory = view(max(start + size for start, size in places))
    return pickle.loads(body, buffers=[memory[start : start + size] for start, size in places])
