"""The two meetings of a step: the controller's end and the workers', failures, and the death of a process."""

import os
import threading
from functools import partial

import pytest

from lockstep.core.membership import Phase
from lockstep.errors import AttemptAborted


def meet(end):
    end.wait_for_sums()
    end.commit()


def make_step(world, together, parts, step=0):
    """Runs one attempt, with a function of its end of the barrier for each member; returns their outcomes."""
    world.begin(step)
    ends = zip(range(len(parts)), world.ends, parts, strict=True)
    return together([partial(world.take_part, seat, partial(part, end)) for seat, end, part in ends])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_member_passes_before_all_have_arrived(open_world, together, count):
    world = open_world(count)
    summed, ready = [], []  # the steps of those that have arrived at each meeting
    seen = []

    def take_part(step, end):
        summed.append(step)
        end.wait_for_sums()
        ready.append(step)
        seen.append((step, "sums", summed.count(step)))
        end.commit()
        seen.append((step, "commit", ready.count(step)))

    for step in range(20):
        assert make_step(world, together, [partial(take_part, step)] * count, step) == [None] * count
        assert world.coordinator.state.phase is Phase.IDLE
    assert set(seen) == {(step, meeting, count) for step in range(20) for meeting in ("sums", "commit")}


def fail(end):
    end.fail()
    raise ZeroDivisionError


def fail_later(end):
    end.wait_for_sums()
    fail(end)


@pytest.mark.parametrize("failure", [fail, fail_later], ids=["first meeting", "second meeting"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_aborts_the_attempt_in_the_others_and_the_next_counts(open_world, together, failing, failure):
    world = open_world(3, clock=lambda: 0.0)  # else a busy machine may have it say that it waits
    outcomes = make_step(world, together, [failure if seat == failing else meet for seat in range(3)])
    expected = [AttemptAborted] * 3
    expected[failing] = ZeroDivisionError
    assert [type(outcome) for outcome in outcomes] == expected
    assert not world.coordinator.is_committed
    assert make_step(world, together, [meet] * 3, step=1) == [None] * 3
    assert world.coordinator.is_committed
    assert world.lines == []


def test_all_fail_and_the_next_attempt_counts(open_world, together):
    world = open_world(3)
    assert [type(outcome) for outcome in make_step(world, together, [fail] * 3)] == [ZeroDivisionError] * 3
    assert make_step(world, together, [meet] * 3, step=1) == [None] * 3


def test_an_error_that_all_raise_after_the_sums_is_the_controllers_own(open_world, together):
    """It may learn of a worker's failure before it has looked at the sums itself."""
    world = open_world(2)
    world.begin()
    world.words.summed[1] = world.words.failed[1] = world.coordinator.state.attempt
    world.coordinator.wait_for_sums()
    assert world.coordinator.state.phase is Phase.COMPUTING


def test_the_death_of_a_worker_ends_the_wait(open_world):
    world = open_world(2)
    world.begin()
    timer = threading.Timer(0.05, world.workers[1].die)
    timer.start()
    with pytest.raises(AttemptAborted):
        world.coordinator.wait_for_sums()  # for ever, if it did not watch
    timer.join()
    world.coordinator.collect()
    world.coordinator.raise_if_given_up()  # no error: the others make the step again
    world.begin()
    assert world.members == (0,)
    meet(world.coordinator)
    assert world.coordinator.is_committed


def test_a_death_at_the_commit_while_another_is_late(open_world, together):
    """What the controller gives up, no worker may commit: here all have arrived, but one of them dies of it."""
    world = open_world(3)
    late, aborted = threading.Event(), threading.Event()

    def lead(end):
        end.wait_for_sums()
        try:
            end.commit()
        finally:
            aborted.set()

    def die(end):
        end.wait_for_sums()
        # Arrives at the commit, and is killed there.
        world.words.ready[1] = world.coordinator.state.attempt
        os.eventfd_write(world.eventfds[0], 1)
        late.wait()
        world.workers[1].die()

    def come_late(end):
        end.wait_for_sums()
        late.set()
        aborted.wait()
        end.commit()

    first, _, third = make_step(world, together, [lead, die, come_late])
    assert (type(first), type(third)) == (AttemptAborted, AttemptAborted)
    assert not world.coordinator.is_committed
    world.begin()
    assert world.members == (0, 2)
    both = [partial(world.take_part, seat, partial(meet, world.ends[seat])) for seat in world.members]
    assert together(both) == [None, None]
    assert world.coordinator.is_committed


def test_an_aborted_attempt_stops_a_worker_at_its_next_shard(open_world):
    world = open_world(2)
    world.begin()
    end = world.barriers[1]
    end.note_shard(3)
    assert world.words.get_shard(1) == 3
    world.coordinator.fail()
    with pytest.raises(AttemptAborted):
        end.note_shard(4)
    assert world.words.get_shard(1) is None  # it computes none any more, so none is suspect if it dies now


def test_a_worker_that_refuses_ends_the_attempt_for_good(open_world, together):
    """No member can take over what the script has changed, so the step is not tried in another process."""
    world = open_world(3)

    def refuse(end):
        end.refuse()
        raise ValueError("not a number")

    first, second, third = make_step(world, together, [meet, refuse, meet])
    assert first is second
    assert type(third) is AttemptAborted
    assert make_step(world, together, [meet] * 3) == [None] * 3
    assert len(world.members) == 3
