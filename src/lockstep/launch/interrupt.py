"""Ctrl-C that waits for the end of a block.

A step that is broken off between two messages leaves processes that wait for
each other. Inside `deferred()` an interrupt is remembered and arrives at the
end of the block instead. A second one goes through at once, so that even a
stuck block can be left.
"""

# Below `signal`, whose functions turn every handler into an enum by way of an exception: 10 µs a block, not 1.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


def deferred() -> "Deferral":
    """Gives a context in which the main thread's SIGINT waits for the end of the block.

    >>> with deferred():
    ...     pass  # nothing here is broken off by the first Ctrl-C
    """
    return Deferral()


class Deferral:
    """One block during which SIGINT waits. It is itself the handler."""

    __slots__ = ("_pending", "_previous")

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._pending = False

    def __enter__(self) -> None:
        # Signals reach Python in the main thread alone. A block inside a block is part of the outer one. And where
        # SIGINT is ignored, ends the process or belongs to C code, that stays so.
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler) and not isinstance(handler, Deferral):
                self._previous = handler
                _signal.signal(_signal.SIGINT, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            _signal.signal(_signal.SIGINT, self._previous)
            if self._pending:
                self._previous(_signal.SIGINT, None)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes a SIGINT: the first waits, the second goes through and both are done with."""
        self._pending = not self._pending
        if not self._pending and self._previous is not None:
            self._previous(number, frame)
