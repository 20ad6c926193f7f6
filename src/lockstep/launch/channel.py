"""Sends and receives length-prefixed messages over a socket between the controller and one worker.

A message is sent as its length in 8 bytes, followed by its bytes. `receive` reads no bytes after the message that it
returns, so `poll` on the descriptor is reliable: the descriptor is readable exactly if a message, or the end of the
stream, has arrived.
"""

import contextlib
import socket
import struct
from collections import deque

_HEAD = struct.Struct("<q")  # the length; a failure's length is negative

# Up to here one copy is cheaper than a second system call.
_SMALL = 1 << 16

# The kernel moves at most 2 GB in one call.
_LARGEST_READ = 1 << 30


class ChannelClosed(EOFError):
    """Raised if the other side has closed the channel or died, or if this side was closed."""


class FailureReported(Exception):
    """Raised by `receive` for a message that reports a failure. `args[0]` has the message's bytes."""


def frame(data: bytes | memoryview) -> list[memoryview]:
    """Returns the parts of one message, for `Channel.send_available`."""
    return [memoryview(part) for part in (_HEAD.pack(len(data)), data) if len(part)]


class Channel:
    """One end of a stream of messages.

    >>> left, right = (Channel(end) for end in socket.socketpair())
    >>> left.send(b"hello")
    >>> right.receive()
    b'hello'
    >>> left.close()
    >>> right.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, data: bytes) -> None:
        """Sends one message; blocks while the socket's buffer is full."""
        self._write(len(data), data)

    def send_failure(self, data: bytes) -> None:
        """Sends one message of at least one byte, which the other side's `receive` raises as `FailureReported`."""
        self._write(-len(data), data)

    def receive(self) -> bytes:
        """Returns the next message, blocking until it arrives. Raises `ChannelClosed` if none can arrive any more."""
        (length,) = _HEAD.unpack(self._read(_HEAD.size))
        if length < 0:
            raise FailureReported(self._read(-length))
        return self._read(length)

    def send_available(self, parts: deque[memoryview]) -> None:
        """Sends as much of the parts (from `frame`) as the socket takes without blocking, and removes what was sent."""
        try:
            while parts:
                count = self._socket.send(parts[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                if count < len(parts[0]):
                    parts[0] = parts[0][count:]
                else:
                    parts.popleft()
        except BlockingIOError:
            pass
        except ConnectionError:
            raise ChannelClosed from None

    def fileno(self) -> int:
        """Returns the descriptor of the socket, for `poll`; -1 after `close`."""
        return self._socket.fileno()

    def shutdown(self) -> None:
        """Ends the stream for both sides, even if a forked process still has a copy of this end."""
        with contextlib.suppress(OSError):  # the other side has died, or this one is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the stream for both sides and closes the descriptor."""
        self.shutdown()
        self._socket.close()

    def _write(self, length: int, data: bytes) -> None:
        head = _HEAD.pack(length)
        parts = [head + data] if len(data) <= _SMALL else [head, data]
        try:
            for part in parts:
                self._socket.sendall(part, socket.MSG_NOSIGNAL)
        except OSError:  # also if memory is short: after half a message the next one could not be read
            raise ChannelClosed from None

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            try:
                part = self._socket.recv(min(size, _LARGEST_READ), socket.MSG_WAITALL)
            except ConnectionError:
                part = b""
            if not part:
                raise ChannelClosed
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
