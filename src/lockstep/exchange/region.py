"""Anonymous shared memory (memfd), without a name that could leak or be opened by others.

A region is a memfd. Its descriptor is inherited by the workers, or opened by them
while the process that made it holds it, so it is gone when the last of them is. It
grows on demand and only the pages that were written take memory. A file can be
shared in the same way.
"""

import mmap
import os
import weakref

from lockstep.errors import PlatformError, WorkerError

PAGE = 4096


class Region:
    """Shared memory behind one descriptor; every process maps it by itself."""

    def __init__(self, descriptor: int, writable: bool = True) -> None:
        self.descriptor = descriptor
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._view = memoryview(b"")

    @classmethod
    def create(cls, name: str) -> "Region":
        """A new, empty region."""
        if not hasattr(os, "memfd_create"):
            raise PlatformError(
                "Several replicas in processes need Linux's memfd, which this platform does not have. Use devices=1."
            )
        descriptor = os.memfd_create(f"lockstep-{name}", os.MFD_CLOEXEC)
        return cls(descriptor)

    @classmethod
    def of_process(cls, pid: int, descriptor: int) -> "Region":
        """The region that another process of this user holds open."""
        try:
            return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise WorkerError(
                f"Shared memory is opened while process {pid} holds it. It cannot be: {error}. "
                "Is /proc mounted, and is that process of the same user?"
            ) from error

    @property
    def nbytes(self) -> int:
        """Its size, whoever made it as large."""
        return os.fstat(self.descriptor).st_size

    def own(self, nbytes: int) -> memoryview:
        """The first `nbytes` as they are, to be written to: what is written stays in this process."""
        return memoryview(mmap.mmap(self.descriptor, max(nbytes, 1), mmap.MAP_PRIVATE))

    def view(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the region or more, made larger where it was smaller.

        An earlier, smaller view stays valid and shows the same memory.
        """
        if len(self._view) < nbytes:
            size = max(-(-nbytes // PAGE) * PAGE, self.nbytes)
            if self.nbytes < size:
                os.ftruncate(self.descriptor, size)
            self._view = memoryview(mmap.mmap(self.descriptor, size, mmap.MAP_SHARED, self._protection))
        return self._view

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last view of it."""
        self._view = memoryview(b"")
        self._finalizer()
