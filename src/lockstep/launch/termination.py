"""Termination: SIGTERM as a request that is answered between two steps.

Schedulers and `docker stop` send it and wait a while before they kill. It may come
twice, to the group and forwarded by a launcher. One that comes later is meant: it
acts as if nobody had asked for the first.
"""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SECONDS_OF_ONE = 5.0  # signals within these are one and the same


class Termination:
    """Inside, SIGTERM only sets `asked`; afterwards the script's own handler is back.

    >>> with Termination() as termination:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     termination.asked
    True
    """

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._previous: Any = None

    def __enter__(self) -> "Termination":
        # Signals reach Python in the main thread alone, and a handler that is C code's cannot be put back.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not None:
            self._previous = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._put_back()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
        elif time.monotonic() - self._asked_at > _SECONDS_OF_ONE:
            self._put_back()
            os.kill(os.getpid(), signal.SIGTERM)

    def _put_back(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
