"""Writes checkpoints in a thread while training continues.

While a job runs, another job may wait. A newer job replaces the waiting job, because only the newest checkpoint
matters, unless the waiting job must be kept. The thread ends when there are no more jobs. It is not a daemon thread, so
a script that ends waits for its last checkpoint.
"""

import threading
from collections.abc import Callable
from types import TracebackType

Job = Callable[[], object]


class Writer:
    """Runs jobs in a thread, one at a time; if a job has failed, the next call of a method raises its error.

    >>> written = []
    >>> with Writer() as writer:
    ...     writer.submit(lambda: written.append("step 100"))
    ...     writer.wait()
    ...     written
    ['step 100']
    """

    def __init__(self) -> None:
        # The lock is reentrant, because a signal handler may call `submit` while the main thread is in a method.
        self._changed = threading.Condition(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._is_running = False
        self._waiting: list[tuple[Job, bool]] = []  # each job, and whether it must be kept
        self._error: BaseException | None = None

    def submit(self, job: Job, keep: bool = False) -> None:
        """Queues a job and returns at once; if an earlier job has failed, raises that error instead.

        A later job replaces this job if it is still waiting, unless `keep` is True.
        """
        self.check()
        with self._changed:
            self._waiting = [(other, is_kept) for other, is_kept in self._waiting if is_kept] + [(job, keep)]
            self._start()

    def wait(self) -> None:
        """Waits until every job has ended; raises the first error of a job, unless it was raised before."""
        with self._changed:
            while self._is_running or self._waiting:
                self._start()  # Ctrl-C may have interrupted the call in `submit`
                self._changed.wait()
            ended, self._threads = self._threads, []
        for thread in ended:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises the error of a job that has failed, unless it was raised before."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits until every job and the thread have ended; raises like `wait`. May be called again."""
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
        """Starts a thread unless a job is running. A superfluous thread does no harm: it finds no job and ends."""
        if not self._is_running:
            thread = threading.Thread(target=self._run, name="lockstep-writer", daemon=False)
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _run(self) -> None:
        while job := self._take_job():
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._error = self._error if self._error is not None else error
            finally:
                with self._changed:
                    self._is_running = False
                    self._changed.notify_all()

    def _take_job(self) -> Job | None:
        """Removes the first waiting job, marks it as running and returns it; None if no job may be started."""
        with self._changed:
            if self._is_running or not self._waiting:
                return None
            (job, _), *self._waiting = self._waiting
            self._is_running = True
            return job
