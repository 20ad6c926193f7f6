"""A barrier in shared memory: each process waits until all have arrived, and learns whether one has failed.

Each process writes the number of the barrier that it has reached into shared memory and signals every other process's
eventfd. There is no memory fence before it reads the others' partial sums: on x86 other processors see a process's
writes in program order, so whoever sees the barrier's number also sees the partial sums written before it. Processors
without that guarantee are refused. The controlling process also polls its workers' pidfds, so it notices the death of
one at once. Workers need not watch it, because they die with their parent.
"""

import os
import platform
import select
from collections.abc import Sequence

from lockstep.errors import PeerFailed, PlatformError
from lockstep.launch.shm import Region

_LINE = 64  # one cache line per process, so that they do not contend: [barrier reached, barrier failed at]


def require_ordered_writes() -> None:
    """Raises `PlatformError` on processors where other processes may see writes in another order."""
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise PlatformError(
            "Several replicas in processes of one host need the memory order of x86-64. This processor is "
            f"{machine or 'unknown'}. Use devices=1, or start the script with torchrun."
        )


class Barrier:
    """This process's end of a barrier of `len(events)` processes; `watched` are pidfds whose end is a failure."""

    def __init__(self, index: int, region: Region, events: Sequence[int], watched: Sequence[int] = ()) -> None:
        words = region.view(len(events) * _LINE)[: len(events) * _LINE].cast("q")
        self._reached, self._failed = words[:: _LINE // 8], words[1 :: _LINE // 8]
        self._index = index
        self._others = [event for number, event in enumerate(events) if number != index]
        self._event = events[index]
        self._watched = frozenset(watched)
        self._poll = select.poll()
        for descriptor in (self._event, *watched):
            self._poll.register(descriptor, select.POLLIN)
        self._number = 0

    def wait(self) -> None:
        """Arrives and blocks until all have arrived; raises PeerFailed if one has failed or died."""
        self._arrive()
        while min(self._reached) < self._number:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._watched:
                    raise PeerFailed
                os.eventfd_read(descriptor)
        if self._number in self._failed.tolist():
            raise PeerFailed

    def fail(self) -> None:
        """Arrives as a failed process, without blocking."""
        self._failed[self._index] = self._number + 1
        self._arrive()

    def _arrive(self) -> None:
        self._number += 1
        self._reached[self._index] = self._number
        for event in self._others:
            os.eventfd_write(event, 1)
