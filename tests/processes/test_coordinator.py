"""The controller's side of a step, with workers that are nothing but eventfds and a clock that the test sets."""

import threading
from contextlib import ExitStack

import pytest

from lockstep.core.lateness import Deadline
from lockstep.core.membership import MAX_FAILURES, Phase
from lockstep.core.membership_events import Admitted
from lockstep.errors import AttemptAborted, WorkerError
from lockstep.processes import process_watch
from processes.fake_workers import FakeWorld


class Clock:
    """Shows each of these times once, and the last for ever."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self):
        return self.times.pop(0) if len(self.times) > 1 else self.times[0]


@pytest.fixture
def open_world():
    with ExitStack() as stack:

        def make(*args, **options):
            world = FakeWorld(*args, **options)
            stack.callback(world.close)
            return world

        yield make


def abort(world):
    """Goes on after an attempt that was aborted."""
    with pytest.raises(AttemptAborted):
        world.coordinator.wait_for_sums()
    world.coordinator.collect()
    assert world.coordinator.state.phase is Phase.IDLE


# -- lateness


def arrive(world, seat, delay=0.05):
    """Has a worker's sums complete a little later."""

    def run():
        try:
            world.barriers[seat].wait_for_sums()
            world.barriers[seat].commit()
        except AttemptAborted:
            pass

    return threading.Timer(delay, run)


def test_a_late_worker_is_named_once_and_waited_for(open_world):
    # The attempt begins, the wait begins, nothing has come for 5 s and for 500 s.
    world = open_world(2, clock=Clock(0.0, 0.0, 5.0, 5.0, 500.0))
    world.begin(7)
    worker = arrive(world, 1)
    worker.start()
    world.coordinator.wait_for_sums()
    assert world.lines == ["waiting for cpu:1 (pid 4001) in step 7, computing"]
    world.coordinator.commit()
    worker.join()
    assert world.coordinator.is_committed
    assert world.lines == ["waiting for cpu:1 (pid 4001) in step 7, computing"]


def test_the_line_has_the_shard_and_all_that_are_late(open_world):
    world = open_world(4, clock=Clock(0.0, 0.0, 5.0, 5.0, 60.0, 60.0), deadline=Deadline(60.0))
    attempt = world.begin(3)
    world.words.summed[2] = attempt
    world.words.set_shard(3, 11)
    with pytest.raises(AttemptAborted):
        world.coordinator.wait_for_sums()
    both = "cpu:1 (pid 4001) and cpu:3 (pid 4003), which computes shard 11,"
    assert world.lines[0] == f"waiting for {both} in step 3, computing"


def test_nothing_is_said_about_a_short_wait(open_world):
    world = open_world(2, clock=Clock(0.0, 0.0, 4.99, 4.99))
    world.begin()
    worker = arrive(world, 1)
    worker.start()
    world.coordinator.wait_for_sums()
    world.coordinator.commit()
    worker.join()
    assert world.lines == []


def test_a_worker_that_is_too_late_is_killed_and_the_attempt_aborted(open_world):
    world = open_world(3, clock=Clock(0.0, 0.0, 5.0, 5.0, 60.0, 60.0), deadline=Deadline(60.0))
    attempt = world.begin(7)
    world.words.summed[2] = attempt
    with pytest.raises(AttemptAborted):
        world.coordinator.wait_for_sums()
    assert world.lines == [
        "waiting for cpu:1 (pid 4001) in step 7, computing",
        "cpu:1 (pid 4001) is ended: no answer for 60 s",
    ]
    assert (world.workers[1].ended, world.workers[2].ended) == (True, False)
    world.workers[2].answer()
    world.coordinator.collect()
    (loss,) = world.coordinator.losses
    assert (loss.seat, loss.is_explained, loss.is_replaced) == (1, True, True)
    world.coordinator.raise_if_given_up()
    world.begin(7)
    assert world.members == (0, 2)


def test_a_worker_that_acknowledges_too_late_is_killed(open_world):
    """Until it has, it may write to the memory of the next attempt."""
    world = open_world(2, clock=Clock(0.0, 0.0, 5.0, 5.0, 60.0, 60.0), deadline=Deadline(60.0))
    world.begin(7)
    world.coordinator.fail()
    assert world.coordinator.state.phase is Phase.ABORTING
    world.coordinator.collect()
    assert world.coordinator.state.phase is Phase.IDLE
    assert world.workers[1].ended
    assert world.lines[0] == "waiting for cpu:1 (pid 4001) in step 7, giving the attempt up"


def test_a_wait_that_ends_before_the_deadline_only_looks_again(open_world, monkeypatch):
    """`poll` cannot wait for longer than 24 days at once."""
    monkeypatch.setattr(process_watch, "_MAX_MILLISECONDS", 1)
    world = open_world(2, clock=Clock(0.0, 0.0, 5.0, 5.0, 6.0, 6.0, 7.0, 7.0, 1e9, 1e9), deadline=Deadline(1e9))
    world.begin(7)
    with pytest.raises(AttemptAborted):
        world.coordinator.wait_for_sums()
    assert world.lines == [
        "waiting for cpu:1 (pid 4001) in step 7, computing",
        "cpu:1 (pid 4001) is ended: no answer for 1000000000 s",
    ]


def test_a_deadline_of_zero_kills_nobody(open_world):
    world = open_world(2, clock=Clock(0.0, 0.0, 5.0, 1e6, 1e6), deadline=Deadline(0))
    world.begin()
    worker = arrive(world, 1)
    worker.start()
    world.coordinator.wait_for_sums()
    world.coordinator.commit()
    worker.join()
    assert not world.workers[1].ended
    assert len(world.lines) == 1


# -- errors


def raise_in(world, seat, error):
    """Has a worker raise in the attempt, which is over then; the other workers acknowledge."""
    world.barriers[seat].fail()
    for each, worker in world.workers.items():
        if each in world.members:
            worker.answer(error if each == seat else None)
    abort(world)


def test_a_shard_that_raises_in_one_worker_is_tried_again_and_in_two_is_the_users_error(open_world):
    world = open_world(3)
    first, second = ValueError("first"), ValueError("second")
    world.begin(4)
    raise_in(world, 1, first)
    world.coordinator.raise_if_given_up()  # not yet
    world.begin(4)
    raise_in(world, 2, second)
    with pytest.raises(ValueError, match="first"):
        world.coordinator.raise_if_given_up()
    assert world.lines == []
    assert not any(worker.ended for worker in world.workers.values())
    # The next step is another one: nobody is blamed for the last.
    world.begin(4)
    assert world.coordinator.state.blamed == frozenset()


def test_a_worker_that_alone_raises_is_replaced(open_world):
    world = open_world(2)
    world.begin(4)
    raise_in(world, 1, ValueError("too large"))
    world.coordinator.raise_if_given_up()
    attempt = world.begin(4)
    world.words.summed[1] = world.words.ready[1] = attempt
    world.coordinator.wait_for_sums()
    world.coordinator.commit()
    assert world.coordinator.is_committed
    assert world.lines == [
        "cpu:1 (pid 4001) is replaced: it raised ValueError in step 4, and the same shards raised nothing in another "
        "process: too large"
    ]
    assert world.workers[1].ended
    assert [(loss.seat, loss.is_replaced) for loss in world.coordinator.losses] == [(1, True)]


def test_a_shard_that_ends_two_processes_stops_the_run(open_world):
    world = open_world(3)
    for number in (1, 2):
        world.begin(9)
        world.words.set_shard(number, 5)
        world.workers[number].die()
        for each in world.members:
            if each not in (0, number):
                world.workers[each].answer()
        abort(world)
    with pytest.raises(WorkerError, match=r"Two processes ended while they computed shard 5 of step 9, .* not tried"):
        world.coordinator.raise_if_given_up()


def test_a_worker_that_cannot_update_is_replaced_and_the_step_counts(open_world):
    world = open_world(2)
    attempt = world.begin(2)
    world.words.summed[1] = world.words.ready[1] = attempt
    world.coordinator.wait_for_sums()
    world.coordinator.commit()
    world.workers[1].answer(MemoryError("no memory"))
    world.coordinator.collect()
    assert world.coordinator.is_committed
    assert world.coordinator.state.phase is Phase.IDLE
    assert world.lines == ["cpu:1 (pid 4001) could not update in step 2: no memory"]
    assert world.workers[1].ended


def test_a_seat_whose_processes_end_again_and_again_is_left_out(open_world):
    world = open_world(2)
    for count in range(1, MAX_FAILURES + 1):
        world.begin(0)
        world.workers[1].die()
        abort(world)
        (loss,) = world.coordinator.losses
        assert loss.is_replaced == (count < MAX_FAILURES)
        world.coordinator.losses = []
        world.replace(1)
        world.coordinator.apply(Admitted(1))


# -- other commands


def test_the_answers_of_the_survivors_and_the_errors_of_those_that_raise(open_world):
    world = open_world(4)
    world.coordinator.expect([1, 2, 3])
    world.workers[1].answer({"loss": 1.0})
    world.workers[2].answer(ValueError("labels"))
    world.workers[3].die()
    assert world.coordinator.collect() == {1: {"loss": 1.0}}
    assert {seat: str(error) for seat, error in world.coordinator.errors.items()} == {2: "labels"}
    assert world.members == (0,)  # members from the next step on
    assert world.coordinator.state.admitted == {1, 2}
    assert world.seats[2].sent.is_stale  # it may not have taken over what came with the command
    assert not world.seats[1].sent.is_stale
