"""The thread that starts workers, relays their output and ends them.

The kernel's parent-death signal fires when the *thread* that started a child ends, so the workers are started by a
thread that lives as long as they do. The same thread opens and closes whatever belongs to a worker or to itself. Python
runs signal handlers in the main thread only, so Ctrl-C, however often, cannot interrupt it between two of these calls.
Other threads send it requests and wait for a limited time; it carries out a request even if the requesting thread is
interrupted.
"""

import contextlib
import math
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from lockstep.errors import WorkerError
from lockstep.launch.deferred_signals import defer_all_interrupts
from lockstep.launch.process import Process

_SECONDS_TO_EXIT = 0.5  # of a worker whose channel was closed, before it is killed
_SECONDS_TO_CLOSE = 10.0  # for a killed process; a core dump or a loaded machine takes time

# Ctrl-C may prevent the finalizer of a pool that is garbage-collected, so the thread also looks by itself.
_SECONDS_BETWEEN_LOOKS = 1.0


class Supervisor:
    """A thread that starts and ends one pool's workers and relays their output, until `close` or the pool's end."""

    def __init__(self, pool: "weakref.ref[Any]") -> None:
        self._pool = pool
        self._owner = os.getpid()
        # Reentrant, because the garbage collector may call `close` in any thread at any moment.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # set by the thread at its end
        self._eventfd = -1  # an eventfd that interrupts the thread's wait
        self._closing = False
        self._processes: list[Process] = []  # those that are not closed

    def require_open(self) -> None:
        """Raises WorkerError after `close`, and in a forked copy of the script."""
        if self._closing or os.getpid() != self._owner:
            raise WorkerError("The workers were closed and cannot be used any more. Call lockstep.wrap again.")

    def start(self, process: Process) -> None:
        """Makes the thread spawn the process; returns at once."""
        with defer_all_interrupts(), self._lock:
            self.require_open()
            self._processes.append(process)
            if self._thread is None:
                self._ended.clear()
                self._thread = threading.Thread(target=self._run, name="lockstep-relay", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads
                    self._give_up(error)
            self._signal()

    def stop(self, process: Process) -> None:
        """Kills the process unless it has ended, reaps it and closes what belongs to it.

        Returns at most ten seconds after the kill, because a process that waits for a disk may not end earlier.
        """
        if os.getpid() != self._owner:
            return
        with defer_all_interrupts():
            process.end_within(0.0)
            self._signal()
            if threading.current_thread() is not self._thread:
                process.closed.wait(max(0.0, process.deadline + _SECONDS_TO_CLOSE - time.monotonic()))

    def close(self) -> None:
        """Closes the channels, kills workers that have not ended half a second later, and reaps and closes all."""
        if os.getpid() != self._owner:  # a forked child, whose copy of this object must not end the workers
            return
        with defer_all_interrupts():
            with self._lock:
                self._closing = True
                self._signal()
                thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            # Not `join` alone: if a signal handler raises in it, Python 3.11 takes the thread for ended.
            if self._ended.wait(_SECONDS_TO_CLOSE):
                thread.join()

    def _signal(self) -> None:
        with self._lock:  # the number may be another file's after the thread has closed it
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def _give_up(self, error: Exception) -> None:
        """Marks all processes as failed; the next `start` tries again."""
        with self._lock:
            self._thread = None
            while self._processes:
                self._processes.pop().fail(error)
            self._ended.set()

    # -- in the thread

    def _run(self) -> None:
        with contextlib.ExitStack() as resources:
            try:
                selector = resources.enter_context(selectors.DefaultSelector())
                eventfd = os.eventfd(0)
            except OSError as error:  # no more descriptors
                self._give_up(error)
                return
            resources.callback(self._release, eventfd)
            self._eventfd = eventfd
            selector.register(eventfd, selectors.EVENT_READ, (None, lambda: os.eventfd_read(eventfd)))
            while (seconds := self._attend(selector)) is not None:
                for key, _ in selector.select(seconds):
                    _, handle = key.data
                    handle()

    def _release(self, eventfd: int) -> None:
        with self._lock:
            self._closing, self._eventfd = True, -1
            os.close(eventfd)
        while self._processes:  # only after an error of this thread, for example if memory runs out
            self._processes.pop().end()
        self._ended.set()

    def _attend(self, selector: selectors.BaseSelector) -> float | None:
        """Starts and ends processes as requested; returns the seconds until the next deadline, or None at the end."""
        if self._pool() is None:
            self._closing = True
        due = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        for process in self._processes.copy():
            if self._closing:
                process.end_within(_SECONDS_TO_EXIT)
            if process.deadline < math.inf:
                self._end(process, selector)
                due = min(due, process.deadline) if time.monotonic() < process.deadline else due
            elif process.pid is None:
                self._spawn(process, selector)
        if self._closing and not self._processes:
            return None
        return max(0.0, due - time.monotonic())

    def _spawn(self, process: Process, selector: selectors.BaseSelector) -> None:
        process.spawn()
        if process.error is not None:
            self._processes.remove(process)
            return

        def watch(source: Any, events: int, handle: Callable[[], bool]) -> None:
            """Calls `handle` when the source is ready, until it returns False."""

            def handle_until_done() -> None:
                if not handle():
                    with contextlib.suppress(KeyError):
                        selector.unregister(source)

            selector.register(source, events, (process, handle_until_done))

        def send() -> bool:
            process.send_entry()
            return not process.sent.is_set()

        def reap() -> bool:
            process.reap()
            return False

        for stream in process.streams:
            watch(stream, selectors.EVENT_READ, stream.relay)
        watch(process.channel, selectors.EVENT_WRITE, send)
        watch(process.pidfd, selectors.EVENT_READ, reap)

    def _end(self, process: Process, selector: selectors.BaseSelector) -> None:
        """Shuts the channel of a running process, and kills it at its deadline; closes a process that has ended."""
        if process.pid is not None and process.exit_code is None:
            assert process.channel is not None
            process.channel.shutdown()
            if time.monotonic() >= process.deadline:
                process.kill()
            return
        for stream in process.streams:
            stream.relay_rest()
        for key in list(selector.get_map().values()):
            if key.data[0] is process:
                selector.unregister(key.fileobj)
        process.end()
        self._processes.remove(process)
