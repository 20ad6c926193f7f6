"""The workers: fresh interpreters that this process starts and that end with it.

They end when `close` is called, when this object is collected, when the script ends
in any way, and, through the kernel's parent-death signal, when it is killed.
"""

import os
import pickle
import select
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import NoReturn

from lockstep.errors import PlatformError, WorkerError
from lockstep.launch import remote_errors
from lockstep.launch.channel import ChannelClosed, FailureReported
from lockstep.launch.interrupt import deferred
from lockstep.launch.output_relay import OutputRelay
from lockstep.launch.process import Process

_SECONDS_TO_LEAVE = 0.5


def require_linux() -> None:
    """Raises `PlatformError` where worker processes cannot be had."""
    try:
        for call in ("memfd_create", "pidfd_open", "eventfd"):
            getattr(os, call)
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise PlatformError(
            "Several CPU replicas need Linux 5.3 or later, with memfd, pidfd and eventfd. "
            f"This is {sys.platform}: {error}. Use devices=1."
        ) from None


class WorkerPool:
    """One worker process per name, each waiting for its payload.

    A payload is the cloudpickle of a callable, `entry(link)`, which the worker runs to its end. The descriptors in
    `share` stay open in every worker under the same numbers.
    """

    def __init__(self, names: Sequence[str], *, share: Sequence[int] = ()) -> None:
        require_linux()
        with deferred():
            try:
                pump = OutputRelay(names, share)
            except (OSError, RuntimeError) as error:  # no more processes, descriptors or threads
                raise WorkerError(
                    f"Every further replica needs a process of its own. Starting {', '.join(names)} failed: {error}. "
                    "Use fewer devices, or raise the limit that was met."
                ) from error
            self._finalizer = weakref.finalize(self, _close, os.getpid(), pump)
        self._processes = pump.processes
        self._ends = select.poll()
        for descriptor in self.pidfds:
            self._ends.register(descriptor, select.POLLIN)

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, in order."""
        return [process.popen.pid for process in self._processes]

    @property
    def pidfds(self) -> list[int]:
        """One descriptor per worker, in order, that polls as readable once the worker has ended."""
        return [process.pidfd for process in self._open()]

    def start(self, payloads: Iterable[bytes]) -> None:
        """Gives each worker what it shall run."""
        for index, (process, payload) in enumerate(zip(self._open(), payloads, strict=True)):
            try:
                process.begin(payload)
            except ChannelClosed:
                self.raise_end(index)

    def send(self, index: int, data: bytes) -> None:
        """Sends a worker one message."""
        process = self._open()[index]
        try:
            with deferred():  # half a message would make nonsense of the next
                process.link.send(data)
        except ChannelClosed:
            self.raise_end(index)

    def receive(self, index: int) -> bytes:
        """Gives a worker's next message, waiting for it; raises what the worker raised, or how it ended."""
        process = self._open()[index]
        try:
            process.wait_for_message()
            with deferred():
                return process.link.receive()
        except FailureReported as reported:
            remote_errors.raise_(pickle.loads(reported.args[0]), process.name)
        except ChannelClosed:
            self.raise_end(index)

    def poll_dead(self) -> int | None:
        """Gives the index of a worker that has ended, if one has."""
        pidfds = self.pidfds
        ended = self._ends.poll(0)
        return pidfds.index(ended[0][0]) if ended else None

    def raise_end(self, index: int) -> NoReturn:
        """Raises what a worker that has ended reported last, or else how it ended."""
        process = self._open()[index]
        error = process.end()
        report = process.last_failure()
        if report is not None:
            remote_errors.raise_(pickle.loads(report), process.name)
        raise error from None

    def close(self) -> None:
        """Lets the workers leave, ends those that do not within half a second, and reaps each. Idempotent."""
        with deferred():
            self._finalizer()

    def _open(self) -> list[Process]:
        if not self._finalizer.alive:
            raise WorkerError("WorkerPool end with `close`. They were asked for afterwards. Wrap the model again.")
        return self._processes


def _close(owner: int, pump: OutputRelay) -> None:
    if os.getpid() != owner:  # a forked copy of this object owns nothing
        return
    for process in pump.processes:
        process.link.close()
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    for process in pump.processes:
        process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
    pump.stop()
    for process in pump.processes:
        process.release()
