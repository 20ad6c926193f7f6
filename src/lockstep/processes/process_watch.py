"""Waits for several processes at once, until one of them signals, answers or ends."""

import os
import select
from collections.abc import Sequence

_MAX_MILLISECONDS = 2**31 - 1  # poll takes a C int


class ProcessWatch:
    """Waits for an eventfd, for the ends of processes, and for channels."""

    def __init__(self, eventfd: int) -> None:
        self._eventfd = eventfd
        self._seats: dict[int, int] = {}  # by pidfd
        self._poll = select.poll()
        self._poll.register(eventfd, select.POLLIN)

    def add(self, seat: int, pidfd: int) -> None:
        """Watches from now on for the end of the process in this seat."""
        self._seats[pidfd] = seat
        self._poll.register(pidfd, select.POLLIN)

    def remove(self, seat: int) -> None:
        """Stops watching a process; must be called before its pidfd is closed, whose number may be used again."""
        for pidfd in [pidfd for pidfd, each in self._seats.items() if each == seat]:
            del self._seats[pidfd]
            self._poll.unregister(pidfd)

    def wait(self, seconds: float | None = None, channels: Sequence[int] = ()) -> list[int] | None:
        """Blocks until something happens; returns the seats whose processes have ended, None if nothing happened.

        None means that the time is over. A wait of more than 24 days may end earlier; the caller then waits again.
        """
        for channel in channels:
            self._poll.register(channel, select.POLLIN)
        try:
            # Rounded up, so that a wait is over when this returns because of the time.
            limit = None if seconds is None else min(1000 * seconds + (seconds > 0), _MAX_MILLISECONDS)
            happened = self._poll.poll(limit)
        finally:
            for channel in channels:
                self._poll.unregister(channel)
        if not happened:
            return None
        descriptors = {descriptor for descriptor, _ in happened}
        if self._eventfd in descriptors:
            os.eventfd_read(self._eventfd)
        return [self._seats[pidfd] for pidfd in descriptors & self._seats.keys()]
