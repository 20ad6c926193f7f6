"""Shards are moved away from where they are to be avoided, and shared out by the time that they take."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.assignment import Balance, move_shards
from lockstep.core.plan import Plan


@pytest.mark.parametrize(
    ("counts", "avoid", "expected"),
    [
        ({0: 1, 1: 1, 2: 1}, {}, (0, 1, 2)),
        ({0: 2, 1: 2}, {1: {2, 3}}, (0, 0, 0, 0)),  # raised in 1, tried in 0
        ({0: 2, 1: 2, 2: 2}, {0: {0}}, (1, 0, 1, 1, 2, 2)),  # ended a process, not tried in the controller
        ({0: 3, 1: 2}, {0: {2}}, (0, 0, 1, 1, 1)),  # the middle of an odd number of shards
        ({0: 1, 1: 1, 2: 1}, {0: {0}, 1: {0}}, (2, 1, 2)),
        ({0: 4}, {0: {1}}, (0, 0, 0, 0)),  # the controller is all there is
        ({0: 1, 1: 1}, {0: {0}, 1: {0}}, (0, 1)),  # all are to avoid it: it stays
    ],
)
def test_shards_that_are_moved(counts, avoid, expected):
    plan = move_shards(Plan.from_counts(counts), avoid)
    assert (plan.owners, plan.replicas) == (expected, tuple(counts))


@given(st.integers(2, 6), st.integers(0, 12), st.data())
def test_nothing_is_where_it_is_to_be_avoided_if_a_seat_is_left(num_seats, more, data):
    plan = Plan.even(num_seats + more, range(num_seats))
    blamed = data.draw(st.sampled_from(plan.replicas[1:]))
    suspects = data.draw(st.sets(st.sampled_from(range(plan.num_shards))))
    avoid = {0: suspects, blamed: set(plan.shards_of([blamed]))}
    moved = move_shards(plan, avoid)
    for seat, shards in avoid.items():
        for shard in shards & set(moved.shards_of([seat])):
            assert all(shard in avoid.get(each, ()) for each in plan.replicas)


def run(balance, seconds, num_steps, num_shards=8, step_seconds=None):
    """Makes steps whose shards take so long on each seat; returns the counts after each."""
    found = []
    for step in range(num_steps):
        counts = balance.choose(sorted(seconds), num_shards)
        found.append(counts)
        own = {seat: count * seconds[seat] * (1 + 0.02 * (step % 3)) for seat, count in counts.items()}
        balance.note(own, max(own.values()) if step_seconds is None else step_seconds)
    return found


def test_equal_seats_keep_equal_counts():
    assert {tuple(counts.values()) for counts in run(Balance(), {0: 1.0, 1: 1.05}, 200)} == {(4, 4)}


def test_a_seat_that_is_slower_gets_less_within_fifty_steps():
    found = run(Balance(), {0: 1.0, 1: 1.0, 2: 3.0}, 50)
    assert found[0] == {0: 3, 1: 3, 2: 2}
    assert found[-1] == {0: 4, 1: 3, 2: 1}


@pytest.mark.parametrize("start", range(15, 45, 3))
def test_a_seat_that_becomes_slower_has_the_best_assignment_fifty_steps_later(start):
    """While now and then something else takes ten times as long as a shard."""
    generator = random.Random(start)
    balance, found = Balance(), []
    for step in range(start + 100):
        counts = balance.choose([0, 1, 2], 16)
        found.append(tuple(counts.values()))
        slow = {1: 3.0} if step >= start else {}
        seconds = {seat: count * slow.get(seat, 1.0) for seat, count in counts.items()}
        seconds = {seat: each + 10 * (generator.random() < 0.05) for seat, each in seconds.items()}
        balance.note(seconds, max(seconds.values()))
    assert set(found[start + 50 :]) == {(7, 2, 7)}


def test_times_that_come_and_go_change_little():
    balance, changes = Balance(), 0
    last = None
    for block in range(40):
        slow = block % 2
        for counts in run(balance, {0: 1.0 + 2 * slow, 1: 3.0 - 2 * slow}, 12):
            changes += counts != last
            last = counts
    assert changes < 10


def test_a_change_that_gains_nothing_is_taken_back():
    """Replicas that share cores slow each other down: the steps take as long with any assignment."""
    found = run(Balance(), {0: 1.0, 1: 2.0}, 400, step_seconds=5.0)
    changed = [tuple(counts.values()) == (6, 2) for counts in found]
    assert changed[10:20] == [True] * 10
    assert 0 < sum(changed) < 200
    assert found[20] == {0: 4, 1: 4}


def test_other_seats_begin_again():
    balance = Balance()
    run(balance, {0: 1.0, 1: 9.0}, 30)
    assert balance.choose([0, 1], 8)[1] < 4
    assert balance.choose([0, 1, 2], 8) == {0: 3, 1: 3, 2: 2}
    assert balance.choose([0, 1], 4) == {0: 2, 1: 2}
