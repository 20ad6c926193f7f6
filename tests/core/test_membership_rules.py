"""The rules of the membership one by one: who is blamed, killed or replaced, and when a step is given up."""

import pytest

from lockstep.core.membership import Membership, Phase, advance
from lockstep.core.membership_events import (
    Abort,
    Acknowledged,
    Admitted,
    Begin,
    Commit,
    Died,
    Failed,
    GiveUp,
    Kill,
    LeaveOut,
    Left,
    Ready,
    Refused,
    Replace,
    Retry,
    Start,
    Unusable,
    Updated,
)

THREE = Membership(members=frozenset({0, 1, 2}))


def run(state, *events):
    """Applies the events; returns the last state, and the actions that followed from the last event."""
    actions = ()
    for event in events:
        state, actions = advance(state, event)
    return state, actions


def fail_attempt(state, attempt, failing, others):
    """Makes an attempt of step 0 that ends because one worker raises; returns what `run` returns."""
    events = [Failed(failing, attempt), *(Acknowledged(seat, attempt) for seat in (failing, *others))]
    return run(state, Begin(0), *events)


def test_a_step_counts_when_all_are_ready_and_is_over_when_all_have_updated():
    state, actions = run(THREE, Begin(0))
    assert actions == (Start(1, (0, 1, 2)),)
    state, actions = run(state, Ready(0, 1), Ready(2, 1))
    assert (state.phase, actions) == (Phase.COMPUTING, ())
    state, actions = run(state, Ready(1, 1))
    assert (state.phase, actions) == (Phase.COMMITTED, (Commit(1),))
    assert run(state, Updated(1))[0].phase is Phase.COMMITTED
    assert run(state, Updated(1), Updated(2))[0].phase is Phase.IDLE


def test_the_historical_hole_ends_in_an_abort_for_both():
    state, actions = run(THREE, Begin(0), Ready(0, 1), Ready(1, 1), Died(1))
    assert actions == (Replace(1), Abort(1))
    state, actions = run(state, Ready(2, 1))  # the late worker
    assert actions == ()
    state, actions = run(state, Acknowledged(2, 1))
    assert (state.members, actions) == ({0, 2}, (Retry(),))


def test_a_death_after_the_commit_costs_nothing():
    state, actions = run(THREE, Begin(0), Ready(0, 1), Ready(1, 1), Ready(2, 1), Died(1), Updated(2))
    assert (state.phase, state.members, actions) == (Phase.IDLE, {0, 2}, ())


@pytest.mark.parametrize(
    "event", [Ready(1, 1), Failed(1, 1), Refused(1, 1), Acknowledged(1, 1)], ids=lambda event: type(event).__name__
)
def test_what_belongs_to_an_earlier_attempt_changes_nothing(event):
    state, _ = fail_attempt(THREE, 1, 1, [2])
    state, _ = run(state, Begin(0))
    assert advance(state, event) == (state, ())


def test_what_raises_in_two_processes_is_the_error_of_the_script():
    state, actions = fail_attempt(THREE, 1, 1, [2])
    assert actions == (Retry(),)
    state, actions = fail_attempt(state, 2, 2, [1])
    assert actions == (GiveUp(),)
    assert state.members == {0, 1, 2}  # no process is at fault


def test_what_raises_in_the_controller_is_the_error_of_the_script():
    assert run(THREE, Begin(0), Failed(0, 1), Acknowledged(1, 1), Acknowledged(2, 1))[1] == (GiveUp(),)


def test_what_a_worker_cannot_take_over_is_the_error_of_the_script():
    state, actions = run(THREE, Begin(0), Refused(1, 1), Acknowledged(1, 1), Acknowledged(2, 1))
    assert (state.members, state.blamed, actions) == ({0, 1, 2}, set(), (GiveUp(),))


def test_a_process_that_raises_twice_alone_is_killed():
    state, _ = fail_attempt(THREE, 1, 1, [2])
    assert run(state, Begin(0), Failed(1, 2))[1] == (Kill(1), Abort(2))


def test_a_process_that_alone_has_raised_is_killed_after_the_commit():
    state, _ = fail_attempt(THREE, 1, 1, [2])
    assert run(state, Begin(0), Ready(0, 2), Ready(1, 2), Ready(2, 2))[1] == (Commit(2), Kill(1))


def test_a_replacement_is_not_blamed_for_the_process_before_it():
    state, _ = fail_attempt(THREE, 1, 1, [2])
    left, _ = run(state, Left(1), Admitted(1), Begin(0))
    assert run(left, Ready(0, 2), Ready(1, 2), Ready(2, 2))[1] == (Commit(2),)
    state, _ = run(state, Died(1), Admitted(1), Begin(0))
    assert run(state, Ready(0, 2), Ready(1, 2), Ready(2, 2))[1] == (Commit(2),)


def test_after_an_error_of_the_script_its_next_batch_is_blamed_for_nothing():
    state, _ = fail_attempt(THREE, 1, 1, [2])
    state, _ = fail_attempt(state, 2, 2, [1])
    state, actions = run(state, Begin(0), Ready(0, 3), Ready(1, 3), Ready(2, 3))  # the same step, another batch
    assert actions == (Commit(3),)


def test_a_shard_that_ends_two_processes_is_given_up():
    state, actions = run(THREE, Begin(0), Died(1, 5), Acknowledged(2, 1))
    assert actions == (Retry(),)
    state, actions = run(state, Admitted(1), Begin(0), Died(2, 5), Acknowledged(1, 2))
    assert actions == (GiveUp(5),)
    assert run(state, Begin(0), Died(1, 5))[1] == (Replace(1), Abort(3), Retry())  # another batch


@pytest.mark.parametrize(
    "second",
    [
        [Begin(0), Died(2, 4)],  # another shard
        [Begin(0), Died(2)],  # no shard at all, such as while it waited
        [Begin(0), Ready(0, 2), Ready(2, 2), Begin(1), Died(2, 5)],  # the same shard of another step
    ],
)
def test_other_deaths_do_not_give_a_shard_up(second):
    state, _ = run(Membership(members=frozenset({0, 1})), Begin(0), Died(1, 5))
    state = run(state, Admitted(2))[0]
    events = [each for event in second for each in ((Updated(2), event) if event == Begin(1) else (event,))]
    assert GiveUp(5) not in run(state, *events)[1]


def test_two_deaths_in_one_attempt_on_one_shard_give_it_up():
    assert run(THREE, Begin(0), Died(1, 5), Died(2, 5))[1] == (Replace(2), GiveUp(5))


def test_a_seat_in_which_three_processes_die_without_a_step_is_left_out():
    pair = Membership(members=frozenset({0, 1}))
    state, actions = run(pair, Begin(0), Died(1))
    assert actions == (Replace(1), Abort(1), Retry())
    state, actions = run(state, Died(1))  # before it was admitted
    assert actions == (Replace(1),)
    assert run(state, Admitted(1), Begin(0), Died(1))[1] == (LeaveOut(1), Abort(2), Retry())
    assert run(state, Admitted(1), Begin(0), Ready(0, 2), Ready(1, 2), Updated(1), Died(1))[1] == (Replace(1),)


def test_a_newcomer_is_a_member_from_the_next_step_on():
    state, _ = run(Membership(members=frozenset({0, 1})), Begin(0), Admitted(2), Ready(0, 1), Ready(1, 1))
    assert (state.members, state.pending) == ({0, 1}, {1})
    assert run(state, Updated(1), Begin(1))[1] == (Start(2, (0, 1, 2)),)
    assert run(state, Died(2), Updated(1), Begin(1))[1] == (Start(2, (0, 1)),)


def test_a_process_that_leaves_is_neither_a_failure_nor_replaced():
    state, actions = run(THREE, Left(2))
    assert (state.members, state.failures, actions) == ({0, 1}, set(), ())
    state, actions = run(state, Admitted(2), Left(2), Begin(0))
    assert actions == (Start(1, (0, 1)),)
    with pytest.raises(AssertionError, match="a process leaves while computing"):
        run(state, Left(1))


def test_a_process_that_cannot_go_on_is_killed_and_its_death_is_an_event_of_its_own():
    state, _ = run(THREE, Begin(0))
    assert advance(state, Unusable(2)) == (state, (Kill(2),))


def test_an_attempt_does_not_begin_during_another():
    with pytest.raises(AssertionError, match="an attempt begins while computing"):
        run(THREE, Begin(0), Begin(0))


def test_the_controller_does_not_die():
    with pytest.raises(AssertionError, match="the controller cannot outlive itself"):
        run(THREE, Died(0))
