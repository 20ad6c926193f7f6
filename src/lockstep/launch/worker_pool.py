"""A pool of workers: fresh interpreters that this process starts and that end with it.

They end when `close` is called, when the pool is garbage-collected, when the script ends in any way, and, by the
kernel's parent-death signal, when the script is killed.
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
from lockstep.launch.output_relay import OutputRelay
from lockstep.launch.process import Process
from lockstep.launch.signals import defer_interrupts

_SECONDS_TO_EXIT = 0.5


def require_linux() -> None:
    """Raises `PlatformError` if this platform cannot run worker processes."""
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
    """One worker process per name. Each waits for its payload.

    A payload is the cloudpickle of a callable `entry(channel)`, which the worker runs until it returns. The descriptors
    in `share` stay open in every worker under the same numbers.
    """

    def __init__(self, names: Sequence[str], *, share: Sequence[int] = ()) -> None:
        require_linux()
        with defer_interrupts():
            try:
                relay = OutputRelay(names, share)
            except (OSError, RuntimeError) as error:  # no more processes, descriptors or threads
                raise WorkerError(
                    f"Starting the processes of {', '.join(names)} failed: {error}. "
                    "Use fewer devices, or raise the limit that was reached."
                ) from error
            self._finalizer = weakref.finalize(self, _close, os.getpid(), relay)
        self._processes = relay.processes
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
        return [process.pidfd for process in self._get_open()]

    def start(self, payloads: Iterable[bytes]) -> None:
        """Sends each worker its payload."""
        for index, (process, payload) in enumerate(zip(self._get_open(), payloads, strict=True)):
            try:
                process.begin(payload)
            except ChannelClosed:
                self.raise_end(index)

    def send(self, index: int, data: bytes) -> None:
        """Sends a worker one message."""
        process = self._get_open()[index]
        try:
            with defer_interrupts():  # after half a message the next one could not be read
                process.channel.send(data)
        except ChannelClosed:
            self.raise_end(index)

    def receive(self, index: int) -> bytes:
        """Returns a worker's next message, blocking; raises the exception that the worker raised, or how it ended."""
        process = self._get_open()[index]
        try:
            process.wait_for_message()
            with defer_interrupts():
                return process.channel.receive()
        except FailureReported as reported:
            remote_errors.raise_received(pickle.loads(reported.args[0]), process.name)
        except ChannelClosed:
            self.raise_end(index)

    def poll_dead(self) -> int | None:
        """Returns the index of a worker that has ended; None if all run."""
        pidfds = self.pidfds
        ended = self._ends.poll(0)
        return pidfds.index(ended[0][0]) if ended else None

    def raise_end(self, index: int) -> NoReturn:
        """Raises the last exception that an ended worker reported, or an error that says how it ended."""
        process = self._get_open()[index]
        error = process.build_end_error()
        report = process.read_last_failure()
        if report is not None:
            remote_errors.raise_received(pickle.loads(report), process.name)
        raise error from None

    def close(self) -> None:
        """Closes the channels, kills workers that have not ended half a second later, and reaps all. Idempotent."""
        with defer_interrupts():
            self._finalizer()

    def _get_open(self) -> list[Process]:
        if not self._finalizer.alive:
            raise WorkerError("The workers were closed and cannot be used any more. Wrap the model again.")
        return self._processes


def _close(owner: int, relay: OutputRelay) -> None:
    if os.getpid() != owner:  # in a forked child, whose copy of this object must not end the workers
        return
    for process in relay.processes:
        process.channel.close()
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    for process in relay.processes:
        process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
    relay.stop()
    for process in relay.processes:
        process.release()
