"""The barrier in shared memory: waiting, failures, and the death of a process."""

import os
import threading

import pytest

from lockstep.errors import PeerFailed


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_member_passes_before_all_have_arrived(barriers, together, count):
    arrived, seen = [], []

    def member(barrier):
        def run():
            for number in range(1, 21):
                arrived.append(number)
                barrier.wait()
                seen.append((number, arrived.count(number)))

        return run

    assert together([member(barrier) for barrier in barriers(count)]) == [None] * count
    assert set(seen) == {(number, count) for number in range(1, 21)}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_raises_in_the_others_and_the_next_barrier_works(barriers, together, failing):
    ends = barriers(3)
    first = together([end.fail if index == failing else end.wait for index, end in enumerate(ends)])
    assert [type(outcome) for outcome in first] == [type(None) if i == failing else PeerFailed for i in range(3)]
    assert together([end.wait for end in ends]) == [None] * 3


def test_a_failure_at_the_second_of_two_barriers(barriers, together):
    one, other = barriers(2)

    def fails():
        one.wait()
        one.fail()
        one.wait()

    def waits():
        other.wait()
        with pytest.raises(PeerFailed):
            other.wait()
        other.wait()

    assert together([fails, waits]) == [None, None]


def test_all_fail_and_the_next_barrier_works(barriers, together):
    ends = barriers(3)
    assert together([end.fail for end in ends]) == [None] * 3
    assert together([end.wait for end in ends]) == [None] * 3


def test_the_death_of_a_watched_process_ends_the_wait(barriers):
    death = os.eventfd(0)  # readable, as a pidfd is once its process has ended
    try:
        watching, _ = barriers(2, [death])
        timer = threading.Timer(0.05, os.eventfd_write, (death, 1))
        timer.start()
        with pytest.raises(PeerFailed):
            watching.wait()  # for ever, if it did not watch
        timer.join()
    finally:
        os.close(death)
