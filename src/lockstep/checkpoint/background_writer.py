"""A thread that writes checkpoints while training continues.

One job runs and one may wait; a newer one takes the waiting one's place, since only
the newest checkpoint matters, unless that one is to be kept. The thread ends when there is nothing left to do: an idle
writer has none, and a script that ends waits for its last checkpoint and no longer.
"""

import threading
from collections.abc import Callable
from types import TracebackType

Job = Callable[[], object]


class Writer:
    """Runs jobs in the background, one at a time; an error comes out at the next call.

    >>> written = []
    >>> with Writer() as writer:
    ...     writer.submit(lambda: written.append("step 100"))
    ...     writer.wait()
    ...     written
    ['step 100']
    """

    def __init__(self) -> None:
        # Reentrant: a signal's handler may submit while the main thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._running = False
        self._waiting: list[tuple[Job, bool]] = []  # and whether it is to be kept
        self._error: BaseException | None = None

    def submit(self, job: Job, keep: bool = False) -> None:
        """Hands over a job and returns at once; raises the error of an earlier one instead."""
        self.check()
        with self._changed:
            self._waiting = [(other, kept) for other, kept in self._waiting if kept] + [(job, keep)]
            self._start()

    def wait(self) -> None:
        """Returns when every job has ended, and raises the first error, once."""
        with self._changed:
            while self._running or self._waiting:
                self._start()  # again, where Ctrl-C broke off the start in `submit`
                self._changed.wait()
            ended, self._threads = self._threads, []
        for thread in ended:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises the error of an earlier job, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits as `wait` does; no thread is left. Does nothing a second time."""
        self.wait()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"A job in the background failed too: {failure}")

    def _start(self) -> None:
        """Starts a thread where none runs a job. One too many is none: it finds nothing to do and ends."""
        if not self._running:
            thread = threading.Thread(target=self._run, name="lockstep-writer", daemon=False)
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _run(self) -> None:
        while job := self._next():
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._error = self._error if self._error is not None else error
            finally:
                with self._changed:
                    self._running = False
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        """The waiting job, which runs from now on; None where there is none or another thread will take it."""
        with self._changed:
            if self._running or not self._waiting:
                return None
            (job, _), *self._waiting = self._waiting
            self._running = True
            return job
