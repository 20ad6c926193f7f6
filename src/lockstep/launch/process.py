"""A worker process: its start, its channel and pipes, and its end.

Only the supervisor's thread spawns, reaps and closes a process. It sets the events for which other threads wait.
"""

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import cloudpickle

from lockstep.launch.channel import Channel, ChannelClosed, frame
from lockstep.launch.environment import build_worker_environment
from lockstep.launch.output_relay import OutputStream

# sys.path is set before the first import of Lockstep, because the parent may have found Lockstep and its dependencies
# in places where a fresh interpreter does not search. The working directory is inherited.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from lockstep.launch.worker_main import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class Process:
    """A worker process that runs `entry(channel)`; no descriptor is opened before `spawn`."""

    def __init__(self, name: str, entry: Callable[[Channel], object], share: Sequence[int]) -> None:
        self.name = name
        self.pid: int | None = None
        self.pidfd = -1
        self.channel: Channel | None = None
        self.streams: list[OutputStream] = []  # its stdout and stderr
        self.error: Exception | None = None  # why it could not be started
        self.exit_code: int | None = None
        self.deadline = math.inf  # when it is killed; finite once it shall end
        self.is_unreachable = False  # whether it was killed because it had closed its channel and went on
        self.spawned = threading.Event()  # or could not be started
        self.sent = threading.Event()  # the entry has been sent, or cannot be sent any more
        self.reaped = threading.Event()
        self.closed = threading.Event()
        self._popen: subprocess.Popen[bytes] | None = None
        self._share = tuple(share)
        self._path = [path for path in sys.path if isinstance(path, str)]
        self._environment = build_worker_environment()
        self._unsent = _pack(entry, self._share)

    def spawn(self) -> None:
        """Starts the process. If that fails, `error` says why and everything is closed."""
        try:
            ours, theirs = socket.socketpair()
            self.channel = Channel(ours)
            with theirs:
                self._popen = subprocess.Popen(
                    self._build_command(theirs.fileno()),
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(), *self._share),
                    process_group=0,  # the terminal's Ctrl-C goes to the parent alone
                    env=self._environment,
                )
            assert self._popen.stdout is not None
            assert self._popen.stderr is not None
            self.streams = [
                OutputStream(self._popen.stdout, "stdout", self.name),
                OutputStream(self._popen.stderr, "stderr", self.name),
            ]
            self.pidfd = os.pidfd_open(self._popen.pid)
        except Exception as error:  # no more processes or descriptors
            self.fail(error)
        else:
            self.pid = self._popen.pid
            self.spawned.set()

    def fail(self, error: Exception) -> None:
        """Records why the process could not be started, and closes everything."""
        self.error = error
        self.end()

    def send_entry(self) -> None:
        """Sends as much of the pickled entry as the channel takes without blocking."""
        assert self.channel is not None
        try:
            self.channel.send_available(self._unsent)
        except ChannelClosed:  # the process has ended
            self._unsent.clear()
        if not self._unsent:
            self.sent.set()

    def end_within(self, seconds: float) -> None:
        """Makes the supervisor kill and close the process after this time, unless an earlier time was set before."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def kill_unreachable(self) -> None:
        """Kills a process that has closed its channel but still runs. Closes nothing, so any thread may call it."""
        self.is_unreachable = True
        with contextlib.suppress(OSError):  # it has ended, and is closed
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def kill(self) -> None:
        """Kills the process, unless it has ended."""
        assert self._popen is not None
        self._popen.kill()

    def reap(self) -> None:
        """Waits for the process to end, and relays what it has written until then."""
        assert self._popen is not None
        self.exit_code = self._popen.wait()
        for stream in self.streams:
            stream.relay_rest()
        self._unsent.clear()
        self.sent.set()
        self.reaped.set()

    def end(self) -> None:
        """Kills and reaps the process, unless that was done before or it was never started, and closes everything."""
        if self._popen is not None and self.exit_code is None:
            self.kill()
            self.reap()
        if self.channel is not None:
            self.channel.close()
        for stream in self.streams:
            stream.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self._unsent.clear()
        for event in (self.spawned, self.sent, self.reaped, self.closed):
            event.set()

    def describe_end(self) -> str:
        """Returns how the process ended, as the predicate of a sentence: "was killed by SIGKILL"."""
        if self.error is not None:
            return f"could not be started: {self.error}"
        if self.is_unreachable:
            return "closed its channel and ran on, so it was killed"
        if self.exit_code is None:
            return "still runs"
        if self.exit_code >= 0:
            return f"left with exit code {self.exit_code}"
        number = -self.exit_code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def _build_command(self, descriptor: int) -> list[str]:
        # How the standard library itself starts an interpreter with the same -W, -X, -O, -I ... as this one.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return [sys.executable, *flags, "-c", _BOOTSTRAP, str(descriptor), str(os.getpid()), *self._path]


def find_readable(*descriptors: int, seconds: float | None = 0.0) -> Sequence[int]:
    """Returns the descriptors that can be read; waits at most `seconds` for the first one, or without limit if None.

    A closed descriptor counts as readable, because reading it fails at once.
    """
    if min(descriptors) < 0:
        return descriptors
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def _pack(entry: Callable[[Channel], object], share: tuple[int, ...]) -> deque[memoryview]:
    """Returns the first messages for a worker: arguments and descriptors, the entry, and the entry's buffers.

    Read-only buffers, such as a model that is already pickled, are not copied, so that the messages to several workers
    can share one. Other buffers are copied, because they may change before they are sent.
    """
    buffers: list[memoryview] = []

    def copy_writable(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.readonly:
            buffers.append(raw)
        return not raw.readonly

    data = cloudpickle.dumps(entry, protocol=5, buffer_callback=copy_writable)
    head = pickle.dumps((sys.argv, share, len(buffers)))
    return deque(part for message in (head, data, *buffers) for part in frame(message))
