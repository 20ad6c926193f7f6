"""A thread that writes checkpoints while training continues.

One job runs and one may wait. A newer job replaces the waiting one, because only the newest checkpoint matters, unless
the waiting one is to be kept. The thread ends when there are no more jobs, and it is not a daemon: a script that ends
waits for its last checkpoint, and for nothing else.
"""

import threading
from collections.abc import Callable
from types import TracebackType

Job = Callable[[], object]


class Writer:
    """Runs jobs in the background, one at a time, and raises a job's error at the next call.

    >>> written = []
    >>> with Writer() as writer:
    ...     writer.submit(lambda: written.append("step 100"))
    ...     writer.wait()
    ...     written
    ['step 100']
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may submit while the main thread is in one of these methods.
        self._changed = threading.Condition(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._is_running = False
        self._waiting: list[tuple[Job, bool]] = []  # and whether the job must not be replaced
        self._error: BaseException | None = None

    def submit(self, job: Job, keep: bool = False) -> None:
        """Queue a job and return at once; raise the error of an earlier job instead, if there is one.

        A later job replaces this one if it is still waiting, unless `keep`.
        """
        self.check()
        with self._changed:
            self._waiting = [(other, is_kept) for other, is_kept in self._waiting if is_kept] + [(job, keep)]
            self._start()

    def wait(self) -> None:
        """Wait until every job has ended, then raise the first error, once."""
        with self._changed:
            while self._is_running or self._waiting:
                self._start()  # again: Ctrl-C may have interrupted the start in `submit`
                self._changed.wait()
            ended, self._threads = self._threads, []
        for thread in ended:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of an earlier job, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait as `wait` does; no thread is left. May be called twice."""
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
        """Start a thread unless a job is running. One thread too many does no harm: it finds no job and ends."""
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
        """Take the waiting job, which counts as running from now on; None if there is none or one is running."""
        with self._changed:
            if self._is_running or not self._waiting:
                return None
            (job, _), *self._waiting = self._waiting
            self._is_running = True
            return job
