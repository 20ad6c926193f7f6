"""A barrier in shared memory: every process waits until all have arrived, and learns who failed.

Each process writes the number of the barrier it has reached into shared memory
and rings every other process's eventfd. It reads the others' partial sums without
a fence: x86 shows a process's writes to the others in the order in which they were
made, other processors may not, so they are refused. The controlling process also watches its
workers' pidfds in the same poll, so a death is noticed at once; it alone decides
what follows. A worker dies with its parent and need not watch it.
"""

import os
import platform
import select
from collections.abc import Sequence

from lockstep.errors import PeerFailed, PlatformError
from lockstep.exchange.region import Region

_LINE = 64  # one cache line a process: [barrier reached, barrier failed at]


def require_ordered_writes() -> None:
    """Raises `PlatformError` on processors that may show a process's writes to the others in another order."""
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise PlatformError(
            "Several replicas with a process each on one host rely on the memory order of x86-64. This processor is "
            f"{machine or 'unknown'}. Use devices=1, or start the script with torchrun."
        )


class Barrier:
    """A barrier of `len(bells)` processes, of which this is number `index`."""

    def __init__(self, index: int, region: Region, bells: Sequence[int], watched: Sequence[int] = ()) -> None:
        words = region.view(len(bells) * _LINE)[: len(bells) * _LINE].cast("q")
        self._reached, self._failed = words[:: _LINE // 8], words[1 :: _LINE // 8]
        self._index = index
        self._others = [bell for number, bell in enumerate(bells) if number != index]
        self._bell = bells[index]
        self._watched = frozenset(watched)
        self._poll = select.poll()
        for descriptor in (self._bell, *watched):
            self._poll.register(descriptor, select.POLLIN)
        self._number = 0

    def wait(self) -> None:
        """Arrives, and returns when all have; raises PeerFailed where one failed or died."""
        self._arrive()
        while min(self._reached) < self._number:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._watched:
                    raise PeerFailed
                os.eventfd_read(descriptor)
        if self._number in self._failed.tolist():
            raise PeerFailed

    def fail(self) -> None:
        """Arrives as one that failed, and does not wait."""
        self._failed[self._index] = self._number + 1
        self._arrive()

    def _arrive(self) -> None:
        self._number += 1
        self._reached[self._index] = self._number
        for bell in self._others:
            os.eventfd_write(bell, 1)
