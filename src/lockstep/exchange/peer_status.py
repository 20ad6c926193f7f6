"""Finds the launched processes that have ended or do not answer, for errors and messages.

When a process ends, its connections close, and the other processes notice at once. The connections of a process that
hangs stay open, so a thread prints for which process this one waits.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.core.lateness import SECONDS_TO_NOTICE
from lockstep.errors import WorkerError

_SECONDS_BETWEEN_LOOKS = 0.5


class Peers:
    """All processes of a launched world, seen from one of them.

    `is_lost(rank)` returns whether the connection to a process is broken.
    """

    def __init__(self, index: int, is_lost: Callable[[int], bool]) -> None:
        self.index = index
        self.hosts: list[str] = []  # by rank
        self._is_lost = is_lost
        self._waiting: tuple[int, float] | None = None  # the rank that is waited for, and since when
        self._thread: threading.Thread | None = None
        self._is_closed = threading.Event()

    def describe(self, rank: int) -> str:
        """Returns a process's rank and host."""
        return f"process {rank} on {self.hosts[rank]}" if self.hosts else f"process {rank}"

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def expect(self, rank: int) -> Iterator[None]:
        """A context in which to wait for a message to or from `rank`; raises WorkerError if a process has ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="lockstep-peers", daemon=True)
            self._thread.start()
        self._waiting = rank, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self.build_error(error, rank) from error
        finally:
            self._waiting = None

    def build_error(self, error: RuntimeError, expected: int | None = None) -> WorkerError:
        """Returns the error that names the processes that have ended, or the one that has not answered."""
        reason = str(error).splitlines()[0]
        began = self._waiting[1] if self._waiting is not None else time.monotonic()
        if "imed out" in reason or "imeout" in reason:  # which closes connections, so the others are not asked
            named, what = [] if expected is None else [expected], f"not answered for {time.monotonic() - began:.0f} s"
        else:
            named = [rank for rank in range(len(self.hosts)) if rank != self.index and self._is_lost(rank)]
            what = "ended"
        if not named:
            return WorkerError(
                "Another launched process has ended or does not answer; see its own output. torch.distributed reports: "
                f"{reason}"
            )
        who = ", ".join(map(self.describe, named)) + (" has" if len(named) == 1 else " have")
        return WorkerError(
            f"{who[0].upper()}{who[1:]} {what}, and every process is needed: process {self.index} stops, too. "
            "See its own output. Launch all again: fit(checkpoint=...) continues from the last checkpoint."
        )

    def _watch(self) -> None:
        said: tuple[int, float] | None = None
        while not self._is_closed.wait(_SECONDS_BETWEEN_LOOKS):
            waiting = self._waiting
            if waiting is None or waiting is said or time.monotonic() - waiting[1] < SECONDS_TO_NOTICE:
                continue
            said = waiting
            text = f"process {self.index} has waited {SECONDS_TO_NOTICE:.0f} s for {self.describe(waiting[0])}"
            print(text, file=sys.stderr, flush=True)
