"""Length-prefixed messages over a socket between the controlling process and one worker.

A message is its length in 8 bytes, then its bytes. Nothing is read ahead of the message asked for, so `poll` on the
descriptor is reliable: it is readable exactly if a message, or the end of the stream, has arrived.
"""

import contextlib
import socket
import struct

_HEAD = struct.Struct("<q")  # the length; a failure's length is negative

# Up to here one copy is cheaper than a second system call.
_SMALL = 1 << 16

# The kernel moves at most 2 GB in one call.
_LARGEST_READ = 1 << 30


class ChannelClosed(EOFError):
    """The other side has closed the channel or died, or this side was closed."""


class FailureReported(Exception):
    """The message reports a failure. `args[0]` holds its bytes."""


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

    def fileno(self) -> int:
        """Returns the descriptor, for `poll`; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Ends the stream for both sides, even if a forked process still holds a copy of this end."""
        with contextlib.suppress(OSError):  # the other side has died, or this one is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, length: int, data: bytes) -> None:
        head = _HEAD.pack(length)
        parts = [head + data] if len(data) <= _SMALL else [head, data]
        try:
            for part in parts:
                self._socket.sendall(part, socket.MSG_NOSIGNAL)
        except ConnectionError:
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
