"""Regions: anonymous shared memory, without a name to leak or to be opened by others.

A region is a memfd. Its descriptor is inherited by the workers, so it is gone
when the last of them is. It grows on demand and only the pages that were written
take memory.
"""

import mmap
import os
import weakref

from lockstep.errors import PlatformError

PAGE = 4096


class Region:
    """Shared memory behind one descriptor; every process maps it by itself."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
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

    def view(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the region or more, made larger where it was smaller.

        An earlier, smaller view stays valid and shows the same memory.
        """
        if len(self._view) < nbytes:
            size = max(-(-nbytes // PAGE) * PAGE, os.fstat(self.descriptor).st_size)
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._view = memoryview(mmap.mmap(self.descriptor, size, mmap.MAP_SHARED))
        return self._view

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last view of it."""
        self._view = memoryview(b"")
        self._finalizer()
