"""The thread that starts the workers and relays their output.

The kernel's parent-death signal fires when the *thread* that started the child ends, so the workers are started by a
thread that lives as long as they do. It writes what they print to the script's streams, line by line, each line with
the worker's name before it.
"""

import contextlib
import os
import queue
import selectors
import sys
import threading
from collections.abc import Sequence
from typing import IO, cast

from lockstep.launch.process import Process

_PIPE = 1 << 16  # the size of a pipe's buffer

# A longer line (a progress bar drawn with carriage returns) is relayed in pieces.
_LONGEST_LINE = 1 << 16


class OutputRelay:
    """The running thread and the workers that it started."""

    def __init__(self, names: Sequence[str], share: Sequence[int]) -> None:
        self._stop = os.eventfd(0)
        started: queue.SimpleQueue[list[Process] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(names, share, started, self._stop), name="lockstep-relay", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            os.close(self._stop)
            raise
        outcome = started.get()
        if isinstance(outcome, BaseException):
            self._thread.join()
            raise outcome
        self.processes = outcome

    def stop(self) -> None:
        """Relays what is still in the pipes and ends the thread. Workers that still run are killed by the kernel."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:  # the garbage collector may call this in any thread
            self._thread.join()


def _run(
    names: Sequence[str],
    share: Sequence[int],
    started: "queue.SimpleQueue[list[Process] | BaseException]",
    stop: int,
) -> None:
    processes: list[Process] = []
    try:
        for name in names:
            processes.append(Process(name, share))
    except BaseException as error:
        for process in processes:
            process.kill()
            process.release()
        started.put(error)
    else:
        started.put(processes)
        _relay([_Stream(process, name) for process in processes for name in ("stdout", "stderr")], stop)
    finally:
        for process in processes:
            process.close_pipes()
        os.close(stop)


class _Stream:
    """stdout or stderr of one worker."""

    def __init__(self, process: Process, name: str) -> None:
        self.pipe: IO[bytes] = getattr(process.popen, name)
        self._process = process
        self._name = name
        self._rest = b""

    def relay(self) -> bool:
        """Relays the complete lines that have arrived; returns False at the end of the stream."""
        try:
            data = os.read(self.pipe.fileno(), _PIPE)
        except BlockingIOError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        self._write([line.decode("utf-8", "replace") for line in lines])
        if not data and self._name == "stderr":
            self._process.stderr_closed.set()
        return bool(data)

    def _write(self, lines: list[str]) -> None:
        if self._name == "stderr":
            self._process.last_lines.extend(lines)
        text = "".join(f"[{self._process.name}] {line}\n" for line in lines)
        # sys.stdout is looked up each time, because notebooks, progress bars and tests replace it. Errors are ignored,
        # because the workers die with this thread.
        with contextlib.suppress(Exception):
            target = getattr(sys, self._name)
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()


def _relay(streams: list[_Stream], stop: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream.pipe, selectors.EVENT_READ, stream)
        stopping = False
        while not stopping:
            for key, _ in selector.select():
                if key.data is None:
                    stopping = True
                elif not cast(_Stream, key.data).relay():
                    selector.unregister(key.fileobj)
        # A process that a worker left behind may hold its pipe open for ever, so read only what is in it now. A full
        # pipe is as long as one read; the second read relays an incomplete line.
        for key in list(selector.get_map().values()):
            if key.data is not None:
                os.set_blocking(key.fd, False)
                cast(_Stream, key.data).relay()
                cast(_Stream, key.data).relay()
