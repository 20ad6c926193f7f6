"""Length-prefixed messages over a socket."""

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from lockstep.launch import channel as channel_module
from lockstep.launch.channel import Channel, ChannelClosed, FailureReported, frame

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = (Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 1 << 16, (1 << 16) + 1, 50_000_001])
def test_a_message_arrives_whole(ends: Ends, size: int) -> None:
    left, right = ends
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)

    def send() -> None:
        left.send(data)
        left.send(b"next")

    sender = threading.Thread(target=send)
    sender.start()
    assert right.receive() == data
    assert right.receive() == b"next"
    sender.join()


@pytest.mark.parametrize("size", [0, 1, 4096, 50_000_001])
def test_a_message_is_sent_without_blocking(ends: Ends, size: int) -> None:
    left, right = ends
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    parts = deque([*frame(data), *frame(b"next")])
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.extend(right.receive() for _ in range(2)))
    left.send_available(parts)  # as much as fits while nothing is read
    assert bool(parts) == (size > 1_000_000)
    reader.start()
    while parts:
        select.select([], [left], [], 10)
        left.send_available(parts)
    reader.join()
    assert received == [data, b"next"]


def test_sending_without_blocking_to_a_closed_end(ends: Ends) -> None:
    left, right = ends
    right.close()
    with pytest.raises(ChannelClosed):
        left.send_available(deque(frame(b"x")))


def test_messages_in_both_directions(ends: Ends) -> None:
    left, right = ends
    left.send(b"question")
    right.send(b"answer")
    assert (right.receive(), left.receive()) == (b"question", b"answer")


def test_a_message_longer_than_one_read(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_LARGEST_READ", 1000)
    left, right = ends
    left.send(bytes(range(250)) * 41)
    left.send(b"next")
    assert right.receive() == bytes(range(250)) * 41
    assert right.receive() == b"next"


def test_bytes_that_arrive_one_by_one() -> None:
    raw, end = socket.socketpair()
    link = Channel(end)
    stream = struct.pack("<q", 5) + b"hello"

    def drip() -> None:
        for byte in stream:
            raw.send(bytes([byte]))

    with raw:
        sender = threading.Thread(target=drip)
        sender.start()
        assert link.receive() == b"hello"
        sender.join()
    link.close()


def test_nothing_is_read_ahead(ends: Ends) -> None:
    left, right = ends
    left.send(b"one")
    left.send(b"two")
    assert right.receive() == b"one"
    assert select.select([right], [], [], 0)[0] == [right]
    right.receive()
    assert select.select([right], [], [], 0)[0] == []


def test_receiving_after_the_other_side_closed(ends: Ends) -> None:
    left, right = ends
    left.send(b"last")
    left.close()
    assert right.receive() == b"last"
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.send(b"too late")
    assert left.fileno() == -1
    left.close()


def test_an_end_in_the_middle_of_a_message() -> None:
    raw, end = socket.socketpair()
    link = Channel(end)
    raw.send(struct.pack("<q", 100) + b"part")
    raw.close()
    with pytest.raises(ChannelClosed):
        link.receive()
    link.close()


def test_the_other_side_closed_without_reading_our_message(ends: Ends) -> None:
    left, right = ends
    right.send(b"unread")
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive()


def test_close_ends_the_stream_despite_a_forked_copy(ends: Ends) -> None:
    left, right = ends
    copy = socket.socket(fileno=socket.dup(left.fileno()))
    with copy:
        left.close()
        with pytest.raises(ChannelClosed):
            right.receive()


def test_a_failure_message_is_raised(ends: Ends) -> None:
    left, right = ends
    left.send_failure(b"what went wrong")
    left.send(b"next")
    with pytest.raises(FailureReported) as caught:
        right.receive()
    assert caught.value.args == (b"what went wrong",)
    assert right.receive() == b"next"
