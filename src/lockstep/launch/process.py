"""One worker as its parent sees it: its process, its channel and its name, and how it ended."""

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
from lockstep.launch.environment import worker_environment

# The path comes before the first import of ours: the parent may have found Lockstep, and what Lockstep needs, in
# places that a fresh interpreter does not look into. The working directory is inherited.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from lockstep.launch.worker_main import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)

_LAST_LINES = 20
_SECONDS_TO_END = 10.0  # for a process whose channel is closed; a core dump or a loaded machine takes time
_SECONDS_FOR_LAST_LINES = 2.0  # a child that the worker left behind may hold its stderr open for ever


class Process:
    """A started worker. `release` closes its channel and pidfd; the output relay closes its pipes."""

    def __init__(self, name: str, share: Sequence[int]) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)  # of its stderr
        self.silent = threading.Event()  # set once its stderr has been read to the end
        self._share = tuple(share)
        ours, theirs = socket.socketpair()
        self.link = Channel(ours)
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
                    env=worker_environment(),
                )
        except BaseException:
            self.link.close()
            raise
        try:
            self.pidfd = os.pidfd_open(self.popen.pid)
        except BaseException:
            self.kill()
            self.close_pipes()
            self.link.close()
            raise
        self._word = _poll(self.link.fileno())
        self._word_or_end = _poll(self.link.fileno(), self.pidfd)
        self._end = _poll(self.pidfd)

    def begin(self, payload: bytes) -> None:
        """Sends what the worker shall run."""
        self.link.send(pickle.dumps((sys.argv, self._share)))
        self.link.send(payload)

    def wait_for_message(self) -> None:
        """Waits until the channel has a message or is closed; raises `ChannelClosed` if the worker has died."""
        self._word_or_end.poll()
        if not self._word.poll(0):
            raise ChannelClosed

    def last_failure(self) -> bytes | None:
        """Gives the failure that the worker reported before it ended, passing over what nobody received."""
        try:
            while self._word.poll(0):
                self.link.receive()
        except FailureReported as reported:
            data: bytes = reported.args[0]
            return data
        except ChannelClosed:
            pass
        return None

    def wait(self, seconds: float) -> bool:
        """Tells whether the worker has ended, waiting for it at most this long."""
        return bool(self._end.poll(1000 * seconds))

    def end(self) -> WorkerError:
        """Gives the error that says how the worker ended."""
        if not self.wait(_SECONDS_TO_END):
            how = "closed its channel but still runs"
        else:
            self.silent.wait(_SECONDS_FOR_LAST_LINES)  # its last words may still be on their way
            how = _how(self.popen.wait())
        said = "".join(f"\n  {line}" for line in self.last_lines)
        return WorkerError(
            f"A worker must live as long as its trainer. Worker {self.name} (pid {self.popen.pid}) {how}."
            + (f" The last lines of its stderr:{said}" if said else " It wrote nothing to stderr.")
        )

    def kill(self) -> None:
        """Ends the worker, where it has not ended by itself, and reaps it."""
        self.popen.kill()
        self.popen.wait()

    def release(self) -> None:
        """Closes the channel and the pidfd of an ended worker."""
        self.link.close()
        os.close(self.pidfd)

    def close_pipes(self) -> None:
        """Closes the pipes of its output."""
        for stream in (self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()


def _poll(*descriptors: int) -> "select.poll":  # quoted: there is none on Windows
    result = select.poll()
    for descriptor in descriptors:
        result.register(descriptor, select.POLLIN)
    return result


def _command(descriptor: int) -> list[str]:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    # The standard library's own way to start an interpreter with the same -W, -X, -O, -I ... as this one.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _BOOTSTRAP, str(descriptor), str(os.getpid()), *path]


def _how(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
