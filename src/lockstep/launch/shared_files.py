"""The eventfds and the shared memory of a controller and its workers."""

import os
import weakref
from collections.abc import Sequence

from lockstep.launch.deferred_signals import defer_all_interrupts
from lockstep.launch.shm import Region


class SharedFiles:
    """Owns one eventfd for each process that may be started, and a region for each name.

    A finalizer of this object closes the eventfds, too, in case Ctrl-C has interrupted the finalizer that should call
    `close`.
    """

    def __init__(self, num_processes: int, names: Sequence[str]) -> None:
        with defer_all_interrupts():  # until each descriptor has an owner
            self.regions = [Region.create(name) for name in names]
            self.eventfds: list[int] = []
            self._finalizer = weakref.finalize(self, _close, self.eventfds)
            for _ in range(num_processes):
                self.eventfds.append(os.eventfd(0))

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the regions."""
        return [region.descriptor for region in self.regions]

    def close(self) -> None:
        """Closes the regions and the eventfds; idempotent."""
        with defer_all_interrupts():
            for region in self.regions:
                region.close()
            self._finalizer()


def _close(eventfds: Sequence[int]) -> None:
    with defer_all_interrupts():
        for eventfd in eventfds:
            os.close(eventfd)
