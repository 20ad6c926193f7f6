"""When a wait is said to be long, and when it is ended."""

from math import inf

import pytest

from lockstep.core.lateness import MIN_DEADLINE, SECONDS_TO_NOTICE, Deadline, Wait


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [
        (None, [], inf),
        (None, [90.0, 1.0], inf),  # the first steps may compile
        (None, [0.01] * 3, MIN_DEADLINE),
        (None, [1.0, 4.0, 1.0], 120.0),  # by the longest
        (None, [9.0] + [4.0] * 20, 120.0),  # of the last steps
        (7.0, [], 7.0),  # as the user has set it, from the first step on
        (7.0, [4.0] * 3, 7.0),
        (0, [4.0] * 3, inf),  # never
    ],
)
def test_deadlines(seconds, steps, expected):
    deadline = Deadline(seconds)
    for step in steps:
        deadline.add_step(step)
    assert deadline.get_seconds() == expected


def test_a_wait_is_noticed_once_and_then_ends():
    wait = Wait(began=100.0, deadline=60.0)
    assert wait.get_timeout(101.0) == SECONDS_TO_NOTICE - 1
    assert not wait.is_notice_due(104.9)
    assert wait.is_notice_due(105.0)
    assert not wait.is_notice_due(106.0)
    assert wait.get_timeout(106.0) == 54.0
    assert not wait.is_over(159.9)
    assert wait.is_over(160.0)
    assert wait.get_timeout(161.0) == 0.0


def test_a_wait_without_a_deadline_is_noticed_and_goes_on():
    wait = Wait(began=0.0, deadline=inf)
    assert wait.get_timeout(0.0) == SECONDS_TO_NOTICE
    assert wait.is_notice_due(1000.0)
    assert wait.get_timeout(1000.0) is None
    assert not wait.is_over(1e9)


def test_a_deadline_before_the_notice_comes_first():
    assert Wait(began=0.0, deadline=2.0).get_timeout(0.5) == 1.5


def test_a_run_that_compiles_waits_longer_before_anything_is_said_or_ended():
    deadline = Deadline.for_compiling(None)
    for _ in range(3):
        deadline.add_step(0.1)
    assert deadline.get_seconds() == deadline.shortest == 1800.0
    wait = Wait(10.0, deadline.get_seconds(), deadline.notice)
    assert not wait.is_notice_due(69.0)
    assert wait.is_notice_due(70.0)
    assert Deadline.for_compiling(7.0).get_seconds() == 7.0
