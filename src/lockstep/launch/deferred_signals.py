"""Defers Ctrl-C and SIGTERM, so that both take effect between two steps instead of inside one.

A step that is interrupted between two messages would leave processes that wait for each other. Inside
`defer_interrupts()` a SIGINT is recorded and delivered at the end of the block; a second SIGINT is delivered at once,
so that a block that hangs can be interrupted. `defer_all_interrupts()` is for a block in which every wait has a
deadline, such as the closing of resources: it delivers one SIGINT at the end of the block, however many have arrived.

`Termination` turns SIGTERM into a flag that the training loop reads between two steps. Schedulers and `docker stop`
send SIGTERM and wait a while before they send SIGKILL. The signal may arrive twice, once because it was sent to the
process group and once because a launcher forwarded it. A SIGTERM that arrives seconds later is a second request, for
which the script's own handler is called.

A SIGTERM to the process group also ends the worker processes of a data loader. The loader then raises an error while a
batch is read or, from its SIGCHLD handler, at any moment. So SIGCHLD is handled here, too: such an error can interrupt
the reading of a batch, but never a step.
"""

# `signal` converts every handler to an enum and catches the exception if that fails: 10 µs a block. `_signal` takes 1.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from lockstep.errors import LockstepError

_SECONDS_OF_ONE = 5.0  # signals that arrive within this time count as one request
_SECONDS_TO_ARRIVE = 1.0  # a signal to a group reaches its processes one after another
_END = object()


def defer_interrupts() -> "InterruptDeferral":
    """Returns a context in which the main thread's SIGINT waits for the end of the block.

    >>> with defer_interrupts():
    ...     pass  # the first Ctrl-C takes effect after this block
    """
    return InterruptDeferral()


def defer_all_interrupts() -> "InterruptDeferral":
    """Returns a context in which every SIGINT of the main thread waits for the end of the block, which must be bounded.

    >>> with defer_all_interrupts():
    ...     pass  # Ctrl-C, however often, takes effect once, after this block
    """
    return InterruptDeferral(limit=None)


class InterruptDeferral:
    """A context that defers SIGINT; the object itself is installed as the signal handler.

    `limit` is the number of signals that are deferred; None means any number.
    """

    __slots__ = ("_limit", "_pending", "_previous")

    def __init__(self, limit: int | None = 1) -> None:
        self._limit = limit
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._pending = 0

    def __enter__(self) -> None:
        # Python delivers signals to the main thread only. A nested block is part of the outer one, unless it defers
        # more. If SIGINT is ignored, has the default action or is handled by C code, that is left as it is.
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler) and (self._limit is None or not isinstance(handler, InterruptDeferral)):
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
        """Records a SIGINT; one that exceeds the limit is delivered at once, and then none at the end of the block."""
        self._pending += 1
        if self._limit is not None and self._pending > self._limit and self._previous is not None:
            self._pending = 0
            self._previous(number, frame)


class StopRequested(BaseException):
    """Raised when SIGTERM interrupts the reading of a batch.

    A BaseException, so that `except Exception` in the script's code does not catch it.
    """


class Termination:
    """A context in which SIGTERM only sets `asked`; restores the script's handler at the end.

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
        # Python delivers signals to the main thread only, and a handler installed by C code (None here) could not be
        # restored.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not None:
            self._previous = signal.signal(signal.SIGTERM, self._handle_request)
            self._install_child_handler()
        return self

    def iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the items of the iterator that `begin` returns; raises `StopRequested` if SIGTERM interrupts it.

        >>> list(Termination().iterate(lambda: iter("ab")))
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
        self._restore_handlers()

    @contextmanager
    def _read(self) -> Iterator[None]:
        self._reading = True
        try:
            yield
        except Exception as error:
            if self.asked or (isinstance(error, RuntimeError | OSError | EOFError) and self._wait_for_signal(error)):
                raise StopRequested from error
            raise
        finally:
            self._reading = False
            if self._previous is not None:
                self._install_child_handler()

    def _wait_for_signal(self, error: Exception) -> bool:
        """Returns whether SIGTERM arrives shortly: it may have ended a reader process first, which caused the error."""
        if self._previous is None or isinstance(error, LockstepError):
            return self.asked
        deadline = time.monotonic() + _SECONDS_TO_ARRIVE
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.asked

    def _handle_request(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM: sets `asked`, or calls the script's handler for a second request."""
        if os.getpid() != self._process:  # a forked child that has not set its own handlers yet
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            if self._reading and self._child_ended and not self._handling_child and not _is_starting_process(frame):
                raise StopRequested
        elif time.monotonic() - self._asked_at > _SECONDS_OF_ONE:
            self._restore_handlers()
            os.kill(os.getpid(), signal.SIGTERM)

    def _install_child_handler(self) -> None:
        """Installs the handler of SIGCHLD, again if torch's loader has replaced it when it started its workers."""
        handler = signal.getsignal(signal.SIGCHLD)
        if handler is not None and handler != self._handle_child:
            self._previous_of_children = signal.signal(signal.SIGCHLD, self._handle_child)

    def _handle_child(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGCHLD: calls the previous handler, but after SIGTERM no error of that handler interrupts a step."""
        if self._handling_child or os.getpid() != self._process:  # the previous handler may call this one
            return
        self._handling_child = self._child_ended = True
        try:
            if self._previous is not None and not self.asked and callable(self._previous_of_children):
                self._previous_of_children(number, frame)
        except Exception as error:
            if not self._wait_for_signal(error):
                raise
        finally:
            self._handling_child = False
        if self._reading and self.asked and not _is_starting_process(frame):
            raise StopRequested

    def _restore_handlers(self) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGTERM, self._previous)
        self._previous = None
        # After SIGTERM the script ends, and a reader process that the signal has ended is no error any more: so the
        # handler that would raise is not restored then.
        if not self.asked and signal.getsignal(signal.SIGCHLD) == self._handle_child:
            signal.signal(signal.SIGCHLD, self._previous_of_children)


def _is_starting_process(frame: FrameType | None) -> bool:
    """Returns whether a loader is starting a process at this moment.

    An exception raised in the hooks that run around a fork is printed and lost, and locks that the hooks hold stay
    locked.
    """
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("multiprocessing.popen_"):
            return True
        frame = frame.f_back
    return False
