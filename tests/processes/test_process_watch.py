"""Waiting for a eventfd, for processes and for channels at once."""

import os
import threading
import time
from contextlib import ExitStack

import pytest

from lockstep.processes import process_watch
from lockstep.processes.process_watch import ProcessWatch


@pytest.fixture
def events():
    """Four eventfds: a eventfd, two pidfds (readable once the process has ended), a channel."""
    with ExitStack() as stack:
        result = [os.eventfd(0) for _ in range(4)]
        for event in result:
            stack.callback(os.close, event)
        yield result


@pytest.fixture
def watch(events):
    eventfd, one, other, _ = events
    watch = ProcessWatch(eventfd)
    watch.add(1, one)
    watch.add(2, other)
    return watch


def test_nothing_happens(watch):
    assert watch.wait(0.0) is None
    start = time.monotonic()
    assert watch.wait(0.05) is None
    assert time.monotonic() - start >= 0.05  # not a moment earlier, so that the caller finds its time over


@pytest.mark.parametrize("seconds", [2_147_483.0, 2_147_484.0, 1e300])  # poll takes at most 2**31 - 1 ms
def test_a_wait_may_be_longer_than_poll_can_be(watch, events, seconds):
    os.eventfd_write(events[1], 1)
    assert watch.wait(seconds) == [1]


def test_a_wait_that_is_too_long_for_poll_ends_early(watch, monkeypatch):
    monkeypatch.setattr(process_watch, "_MAX_MILLISECONDS", 20)
    assert watch.wait(1e300) is None


def test_the_eventfd_is_read(watch, events):
    os.eventfd_write(events[0], 3)
    assert watch.wait() == []
    assert watch.wait(0.0) is None


def test_ends_are_reported_until_they_are_removed(watch, events):
    for event in events[:3]:
        os.eventfd_write(event, 1)
    assert sorted(watch.wait()) == [1, 2]
    watch.remove(1)
    assert watch.wait() == [2]
    watch.remove(2)
    watch.remove(2)
    assert watch.wait(0.0) is None


def test_another_process_gets_the_seat_and_the_descriptor(watch, events):
    os.eventfd_write(events[1], 1)
    assert watch.wait() == [1]
    watch.remove(1)
    os.eventfd_read(events[1])
    watch.add(3, events[1])
    assert watch.wait(0.0) is None
    os.eventfd_write(events[1], 1)
    assert watch.wait() == [3]


def test_a_channel_counts_in_its_own_wait_only(watch, events):
    os.eventfd_write(events[3], 1)
    assert watch.wait(0.0) is None
    assert watch.wait(None, [events[3]]) == []
    assert watch.wait(0.0) is None


@pytest.mark.parametrize("index, found", [(0, []), (1, [1]), (3, [])])
def test_a_wait_without_end_ends_when_something_happens(watch, events, index, found):
    timer = threading.Timer(0.02, os.eventfd_write, (events[index], 1))
    timer.start()
    assert watch.wait(None, [events[3]]) == found
    timer.join()
