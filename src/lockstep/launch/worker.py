"""The object through which the script's process uses one worker."""

import pickle
from typing import NoReturn

from lockstep.errors import WorkerError
from lockstep.launch import remote_errors
from lockstep.launch.channel import Channel, ChannelClosed, FailureReported
from lockstep.launch.deferred_signals import defer_interrupts
from lockstep.launch.process import Process, find_readable
from lockstep.launch.supervisor import Supervisor

_SECONDS_TO_END = 10.0  # for a process whose channel is closed; a core dump or a loaded machine takes time


class Worker:
    """A worker process of a pool, which starts in the background. Each method is for one thread at a time.

    A caller that polls `fileno()` or `pidfd` itself must stop polling before it calls `stop`, which closes both.
    """

    def __init__(self, process: Process, supervisor: Supervisor) -> None:
        self.name = process.name
        self._process = process
        self._supervisor = supervisor

    @property
    def pid(self) -> int | None:
        """The process id; None until the supervisor's thread has spawned the process."""
        return self._process.pid

    @property
    def pidfd(self) -> int:
        """A descriptor that polls as readable once the process has ended; -1 before it was spawned and after `stop`."""
        return self._process.pidfd

    def fileno(self) -> int:
        """Returns the descriptor of the channel, for `poll`; -1 before the process was spawned and after `stop`."""
        return -1 if self._process.channel is None else self._process.channel.fileno()

    def wait_until_spawned(self) -> None:
        """Blocks until `pid`, `pidfd` and `fileno()` are known; raises WorkerError if the process cannot be started."""
        self._process.spawned.wait()
        self._get_channel()

    def has_message(self) -> bool:
        """Returns without blocking whether `receive` would return a message, or raise the worker's end, at once."""
        process = self._process
        return process.error is not None or (
            process.sent.is_set() and bool(find_readable(self._get_channel().fileno(), process.pidfd))
        )

    def receive(self) -> bytes:
        """Returns the next message, blocking; raises the worker's exception, or WorkerError if the worker ended."""
        process = self._process
        process.sent.wait()
        channel = self._get_channel()
        try:
            ready = find_readable(channel.fileno(), process.pidfd, seconds=None)
            # If only the pidfd was readable, the last message may have come a moment before it. There is none if a
            # process that the worker left behind holds the channel open.
            if channel.fileno() in ready or find_readable(channel.fileno()):
                with defer_interrupts():
                    return channel.receive()
        except FailureReported as reported:
            remote_errors.raise_received(pickle.loads(reported.args[0]), self.name)
        except ChannelClosed:
            pass
        self.raise_end()

    def send(self, data: bytes) -> None:
        """Sends one message; blocks until the worker has read its first messages, and while the channel is full."""
        self._process.sent.wait()
        channel = self._get_channel()
        try:
            with defer_interrupts():  # after half a message the next one could not be read
                channel.send(data)
        except ChannelClosed:
            self.raise_end()

    def has_ended(self) -> bool:
        """Returns whether the process has ended, was stopped or could not be started."""
        process = self._process
        return process.reaped.is_set() or (process.spawned.is_set() and bool(find_readable(process.pidfd)))

    def describe_end(self) -> str:
        """Returns how the worker ended, such as "was killed by SIGKILL" or "left with exit code 3"."""
        self._wait_for_end()
        return self._process.describe_end()

    def raise_end(self) -> NoReturn:
        """Raises the last exception that an ended worker reported, or a WorkerError that says how it ended."""
        channel = self._get_channel()
        self._wait_for_end()
        report = _read_last_failure(channel)
        if report is not None:
            remote_errors.raise_received(pickle.loads(report), self.name)
        _, stderr = self._process.streams
        lines = "".join(f"\n  {line}" for line in stderr.last_lines)
        raise WorkerError(
            f"Worker {self.name} (pid {self.pid}) {self._process.describe_end()}."
            + (f" The last lines of its stderr:{lines}" if lines else " It wrote nothing to stderr.")
        ) from None

    def stop(self) -> None:
        """Kills the worker unless it has ended, and closes what belongs to it. Idempotent."""
        self._supervisor.stop(self._process)

    def _wait_for_end(self) -> None:
        """Waits a while, because the channel may be closed a moment before the process has ended; then kills it."""
        if not self._process.reaped.wait(_SECONDS_TO_END):
            self._process.kill_unreachable()
            self._process.reaped.wait(_SECONDS_TO_END)

    def _get_channel(self) -> Channel:
        process = self._process
        if process.error is not None:
            raise WorkerError(
                f"Worker {self.name} could not be started: {process.error}. "
                "Use fewer devices, or raise the limit that was reached."
            ) from process.error
        if process.channel is None or process.closed.is_set():
            raise WorkerError("The workers were closed and cannot be used any more. Call lockstep.wrap again.")
        return process.channel


def _read_last_failure(channel: Channel) -> bytes | None:
    """Returns the failure that a worker reported before it ended, if any; drops unread messages before it."""
    try:
        while find_readable(channel.fileno()):
            channel.receive()
    except FailureReported as reported:
        data: bytes = reported.args[0]
        return data
    except ChannelClosed:
        pass
    return None
