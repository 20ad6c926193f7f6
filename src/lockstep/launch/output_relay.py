"""Relays what workers print to the script's streams, line by line, each line prefixed with the worker's name."""

import contextlib
import os
import sys
from collections import deque
from typing import IO

_PIPE = 1 << 16  # the size of a pipe's buffer

# A longer line (a progress bar drawn with carriage returns) is relayed in pieces.
_LONGEST_LINE = 1 << 16

_LAST_LINES = 20


class OutputStream:
    """The stdout or stderr of one worker, read from `pipe` without blocking."""

    def __init__(self, pipe: IO[bytes], name: str, worker: str) -> None:
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._pipe = pipe
        self._name = name
        self._worker = worker
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Returns the descriptor of the pipe."""
        return self._pipe.fileno()

    def relay(self) -> bool:
        """Writes the complete lines that have arrived to the script's stream; returns False at the end of the pipe."""
        try:
            data = os.read(self._pipe.fileno(), _PIPE)
        except BlockingIOError:
            return True
        self._split(data)
        return bool(data)

    def relay_rest(self) -> None:
        """Relays what is in the pipe now, including an incomplete last line.

        Reads at most as many bytes as a pipe holds, because a process that the worker left behind may write without
        end.
        """
        self.relay()
        self._split(b"")

    def close(self) -> None:
        """Closes the pipe."""
        self._pipe.close()

    def _split(self, data: bytes) -> None:
        """Writes the lines that `data` completes; without data, also writes an incomplete line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write([line.decode("utf-8", "replace") for line in lines])

    def _write(self, lines: list[str]) -> None:
        self.last_lines.extend(lines)
        text = "".join(f"[{self._worker}] {line}\n" for line in lines)
        # sys.stdout is looked up each time, because notebooks, progress bars and tests replace it. Errors are ignored,
        # because the workers die with this thread.
        with contextlib.suppress(Exception):
            target = getattr(sys, self._name)
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()
