"""The one thread that starts the workers and passes on their output.

A parent-death signal fires when the *thread* that started the child ends, so
the workers are started by a thread that lives as long as they do. It passes
on what they print, line by line, each with the worker's name before it.
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

_PIPE = 1 << 16  # the bytes that a pipe holds

# A line longer than this (a bar drawn with carriage returns) is passed on in pieces.
_LONGEST_LINE = 1 << 16


class OutputRelay:
    """A running thread with its workers."""

    def __init__(self, names: Sequence[str], share: Sequence[int]) -> None:
        self._stop = os.eventfd(0)
        started: queue.SimpleQueue[list[Process] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(names, share, started, self._stop), name="lockstep-pump", daemon=True
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
        """Passes on what is still in the pipes and ends the thread. WorkerPool that still run die."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:  # the collector of garbage may run in any thread
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
        _carry([_Stream(process, name) for process in processes for name in ("stdout", "stderr")], stop)
    finally:
        for process in processes:
            process.close_pipes()
        os.close(stop)


class _Stream:
    """One output of one worker."""

    def __init__(self, process: Process, name: str) -> None:
        self.pipe: IO[bytes] = getattr(process.popen, name)
        self._process = process
        self._name = name
        self._rest = b""

    def carry(self) -> bool:
        """Passes on the whole lines among what has come; False at the end of the stream."""
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
            self._process.silent.set()
        return bool(data)

    def _write(self, lines: list[str]) -> None:
        if self._name == "stderr":
            self._process.last_lines.extend(lines)
        text = "".join(f"[{self._process.name}] {line}\n" for line in lines)
        # The script's current stream: notebooks, progress bars and tests put their own in its place. Whatever is
        # wrong with it, this thread must live on, or the workers end.
        with contextlib.suppress(Exception):
            target = getattr(sys, self._name)
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()


def _carry(streams: list[_Stream], stop: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        for stream in streams:
            selector.register(stream.pipe, selectors.EVENT_READ, stream)
        stopping = False
        while not stopping:
            for key, _ in selector.select():
                if key.data is None:
                    stopping = True
                elif not cast(_Stream, key.data).carry():
                    selector.unregister(key.fileobj)
        # A process that a worker left behind may hold its pipe open for ever: read only what is there. A full pipe
        # is as long as one read; the second one passes on an unfinished line.
        for key in list(selector.get_map().values()):
            if key.data is not None:
                os.set_blocking(key.fd, False)
                cast(_Stream, key.data).carry()
                cast(_Stream, key.data).carry()
