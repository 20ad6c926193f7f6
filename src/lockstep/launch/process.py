"""A worker process as its parent sees it: its channel, its output, and how it ended."""

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from lockstep.errors import WorkerError
from lockstep.launch.channel import Channel, ChannelClosed, FailureReported
from lockstep.launch.environment import build_worker_environment

# sys.path is set before the first import of Lockstep, because the parent may have found Lockstep and its dependencies
# in places where a fresh interpreter does not search. The working directory is inherited.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from lockstep.launch.worker_main import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

_LAST_LINES = 20
_SECONDS_TO_END = 10.0  # for a process whose channel is closed; a core dump or a loaded machine takes time
_SECONDS_FOR_LAST_LINES = 2.0  # a child that the worker left behind may hold its stderr open for ever


class Process:
    """A worker process. `release` closes its channel and pidfd; the output relay closes its pipes."""

    def __init__(self, name: str, share: Sequence[int]) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)  # of its stderr
        self.stderr_closed = threading.Event()  # set once its stderr has been read to the end
        self._share = tuple(share)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            with theirs:
                self.popen = subprocess.Popen(
                    _command(theirs.fileno()),
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(), *share),
                    process_group=0,  # the terminal's Ctrl-C goes to the parent alone
                    env=build_worker_environment(),
                )
        except BaseException:
            self.channel.close()
            raise
        try:
            self.pidfd = os.pidfd_open(self.popen.pid)
        except BaseException:
            self.kill()
            self.close_pipes()
            self.channel.close()
            raise
        self._message = _poll(self.channel.fileno())
        self._message_or_end = _poll(self.channel.fileno(), self.pidfd)
        self._end = _poll(self.pidfd)

    def begin(self, payload: bytes) -> None:
        """Sends the entry that the worker is to run."""
        self.channel.send(pickle.dumps((sys.argv, self._share)))
        self.channel.send(payload)

    def wait_for_message(self) -> None:
        """Blocks until a message arrives or the channel is closed; raises `ChannelClosed` if the worker has died."""
        self._message_or_end.poll()
        if not self._message.poll(0):
            raise ChannelClosed

    def read_last_failure(self) -> bytes | None:
        """Returns the failure that the worker reported before it ended; skips messages that were not received."""
        try:
            while self._message.poll(0):
                self.channel.receive()
        except FailureReported as reported:
            data: bytes = reported.args[0]
            return data
        except ChannelClosed:
            pass
        return None

    def wait(self, seconds: float) -> bool:
        """Waits at most this long for the worker to end; returns whether it has."""
        return bool(self._end.poll(1000 * seconds))

    def build_end_error(self) -> WorkerError:
        """Returns the error that says how the worker ended, with its last lines."""
        if not self.wait(_SECONDS_TO_END):
            how = "closed its channel but still runs"
        else:
            self.stderr_closed.wait(_SECONDS_FOR_LAST_LINES)  # the last lines may still be in the pipe
            how = _describe_exit(self.popen.wait())
        lines = "".join(f"\n  {line}" for line in self.last_lines)
        return WorkerError(
            f"Worker {self.name} (pid {self.popen.pid}) {how}."
            + (f" The last lines of its stderr:{lines}" if lines else " It wrote nothing to stderr.")
        )

    def kill(self) -> None:
        """Kills the worker if it has not ended, and reaps it."""
        self.popen.kill()
        self.popen.wait()

    def release(self) -> None:
        """Closes the channel and the pidfd of an ended worker."""
        self.channel.close()
        os.close(self.pidfd)

    def close_pipes(self) -> None:
        """Closes the pipes of its stdout and stderr."""
        for stream in (self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()


def _poll(*descriptors: int) -> "select.poll":  # quoted, because Windows has no select.poll
    result = select.poll()
    for descriptor in descriptors:
        result.register(descriptor, select.POLLIN)
    return result


def _command(descriptor: int) -> list[str]:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    # How the standard library itself starts an interpreter with the same -W, -X, -O, -I ... as this one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _BOOTSTRAP, str(descriptor), str(os.getpid()), *path]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
