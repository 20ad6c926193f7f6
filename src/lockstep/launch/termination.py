"""Termination: SIGTERM as a request that is answered between two steps.

Schedulers and `docker stop` send it and wait a while before they kill. It may come
twice, to the group and forwarded by a launcher. One that comes later is meant: it
acts as if nobody had asked for the first.

Sent to a process group it also ends the processes with which a loader reads, and the
loader then raises: while a batch is read, or out of a handler of SIGCHLD at any
moment. So SIGCHLD is handled here as well, and nothing but reading is broken off.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from lockstep.errors import LockstepError

_SECONDS_OF_ONE = 5.0  # signals within these are one and the same
_SECONDS_TO_ARRIVE = 1.0  # a signal to a group reaches its processes one after another
_END = object()


class StopRequested(BaseException):
    """SIGTERM has ended the reading of a batch. Not an Exception, because it passes through the script's own code."""


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
        self._previous_of_children: Any = None
        self._handling_child = self._reading = self._child_ended = False
        self._process = os.getpid()

    def __enter__(self) -> "Termination":
        # Signals reach Python in the main thread alone, and a handler that is C code's cannot be put back.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not None:
            self._previous = signal.signal(signal.SIGTERM, self._ask)
            self._handle_children()
        return self

    def over(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the items of an iterator that `begin` gives; what breaks because of SIGTERM raises `StopRequested`.

        >>> list(Termination().over(lambda: iter("ab")))
        ['a', 'b']
        """
        with self._read():
            iterator = begin()
        while True:
            with self._read():
                item = next(iterator, _END)
            if item is _END:
                return
            yield item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._put_back()

    @contextmanager
    def _read(self) -> Iterator[None]:
        self._reading = True
        try:
            yield
        except Exception as error:
            if self.asked or (isinstance(error, RuntimeError | OSError | EOFError) and self._is_coming(error)):
                raise StopRequested from error
            raise
        finally:
            self._reading = False
            if self._previous is not None:
                self._handle_children()

    def _is_coming(self, error: Exception) -> bool:
        """Returns whether SIGTERM comes now: a reader that got it earlier may have been the cause of the error."""
        if self._previous is None or isinstance(error, LockstepError):
            return self.asked
        deadline = time.monotonic() + _SECONDS_TO_ARRIVE
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork that has not set its own handlers yet
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            if self._reading and self._child_ended and not self._handling_child and not _is_starting_process(frame):
                raise StopRequested
        elif time.monotonic() - self._asked_at > _SECONDS_OF_ONE:
            self._put_back()
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle_children(self) -> None:
        """Takes SIGCHLD (back); torch's loaders set a handler of their own with the first workers."""
        handler = signal.getsignal(signal.SIGCHLD)
        if handler is not None and handler != self._note_child:
            self._previous_of_children = signal.signal(signal.SIGCHLD, self._note_child)

    def _note_child(self, number: int, frame: FrameType | None) -> None:
        """Calls the handler that was there, but does not let it break off a step because of SIGTERM."""
        if self._handling_child or os.getpid() != self._process:  # the handler that was there may call this one
            return
        self._handling_child = self._child_ended = True
        try:
            if self._previous is not None and not self.asked and callable(self._previous_of_children):
                self._previous_of_children(number, frame)
        except Exception as error:
            if not self._is_coming(error):
                raise
        finally:
            self._handling_child = False
        if self._reading and self.asked and not _is_starting_process(frame):
            raise StopRequested

    def _put_back(self) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGTERM, self._previous)
        self._previous = None
        # After SIGTERM the script ends: a reader that it has ended is no error any more.
        if not self.asked and signal.getsignal(signal.SIGCHLD) == self._note_child:
            signal.signal(signal.SIGCHLD, self._previous_of_children)


def _is_starting_process(frame: FrameType | None) -> bool:
    """Whether a loader is starting a process right now.

    What is raised in the hooks that run around a fork is printed and lost, and locks that they hold stay locked.
    """
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("multiprocessing.popen_"):
            return True
        frame = frame.f_back
    return False
