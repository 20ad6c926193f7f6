"""Every interleaving of a few steps with faults: docs/design/membership.md says what is required and why."""

from typing import NamedTuple

import pytest

from core.exploration import explore, require
from core.membership_model import Model
from lockstep.core.membership import CONTROLLER, Membership, Phase, advance
from lockstep.core.membership_events import Abort, Admitted, Begin, Died, GiveUp, Ready, Replace, Retry

# members at first, newcomers that wait to be admitted, faults, arrivals later on, steps, and whether the controller
# notices the death of a process that it kills at once
CASES = {
    "three members, no fault": (3, 0, 0, 0, 2, True),
    "two members, two faults, one arrival": (2, 0, 2, 1, 2, True),
    "two members and a newcomer, two faults": (2, 1, 2, 0, 2, True),
    "three members, two faults, one arrival": (3, 0, 2, 1, 2, True),
    "the same, and deaths by its own hand are noticed later": (3, 0, 2, 1, 2, False),
}


def explore_case(members, newcomers, faults, arrivals, num_steps, is_kill_noticed, rules=advance):
    model = Model(num_steps, rules, is_kill_noticed)
    return explore(model, model.open(members, newcomers, faults, arrivals))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_interleaving_loses_a_step_or_makes_it_twice_or_mixes_attempts_or_waits_for_the_dead(case):
    found = explore_case(*case)
    print(f"{found.num_states:,} states")
    assert not found.violation, "\n".join([f"after {found.num_states:,} states: {found.violation}", *found.moves])


class Meeting(NamedTuple):
    """The commit of three processes that each decide for themselves; 0 is the controller."""

    arrived: frozenset[int] = frozenset()
    outcomes: tuple[str, str, str] = ("", "", "")  # "made", "not made" or "dead"


class BarrierWithoutDecision:
    """The barrier that Lockstep had before: whoever sees that all have arrived counts the step as made.

    The controller alone notices deaths. It looks for them until it has seen that all have arrived.
    """

    def list_moves(self, meeting):
        for seat, outcome in enumerate(meeting.outcomes):
            name = f"worker {seat}" if seat else "controller"
            if outcome:
                continue
            if seat not in meeting.arrived:
                yield f"{name} arrives", False, meeting._replace(arrived=meeting.arrived | {seat})
            elif len(meeting.arrived) == 3:
                yield f"{name}: made", False, self.decide(meeting, seat, "made")
            elif seat == CONTROLLER and "dead" in meeting.outcomes:
                yield f"{name}: not made", False, self.decide(meeting, seat, "not made")
            if seat != CONTROLLER and "dead" not in meeting.outcomes:
                yield f"{name} dies", True, self.decide(meeting, seat, "dead")

    def decide(self, meeting, seat, outcome):
        outcomes = list(meeting.outcomes)
        outcomes[seat] = outcome
        return meeting._replace(outcomes=tuple(outcomes))

    def check(self, meeting):
        require(not {"made", "not made"} <= set(meeting.outcomes), "the members disagree about whether a step counts")

    def is_final(self, meeting):
        return meeting.outcomes[CONTROLLER] != ""


def test_a_barrier_at_which_each_process_decides_for_itself_has_a_hole():
    found = explore(BarrierWithoutDecision(), Meeting())
    assert found.violation == "the members disagree about whether a step counts"
    assert found.moves == (
        "controller arrives",
        "worker 1 arrives",
        "worker 1 dies",
        "controller: not made",
        "worker 2 arrives",
        "worker 2: made",
    )


# Rules with one mistake each: the exploration has to find what is wrong with them.


def forget_acknowledgements(state, event):
    """An abort is over at once."""
    state, actions = advance(state, event)
    if state.phase is Phase.ABORTING:
        state, actions = state._replace(phase=Phase.IDLE, pending=frozenset()), (*actions, state.verdict or Retry())
    return state, actions


def commit_without_the_last(state, event):
    """The step counts while the slice of one worker is missing."""
    state, actions = advance(state, event)
    if isinstance(event, Ready) and state.phase is Phase.COMPUTING and len(state.pending) == 1:
        state, actions = advance(state, Ready(*state.pending, state.attempt))
    return state, actions


def commit_without_the_dead(state, event):
    """A worker that dies before the commit is not waited for any more, and the others go on."""
    if isinstance(event, Died) and state.phase is Phase.COMPUTING:
        pending = state.pending - {event.seat}
        return state._replace(members=state.members - {event.seat}, pending=pending), (Replace(event.seat),)
    return advance(state, event)


def wait_for_the_dead(state, event):
    """A process that dies is still waited for."""
    if isinstance(event, Died) and event.seat in state.pending and state.phase is not Phase.COMPUTING:
        return state._replace(members=state.members - {event.seat}), (Replace(event.seat),)
    return advance(state, event)


def keep_the_dead(state, event):
    """A process that dies stays a member."""
    after, actions = advance(state, event)
    return (after._replace(members=state.members) if isinstance(event, Died) else after), actions


def admit_at_once(state, event):
    """A newcomer is a member of the attempt that is running."""
    if isinstance(event, Admitted) and state.phase is not Phase.IDLE:
        return state._replace(members=state.members | {event.seat}), ()
    return advance(state, event)


def go_on_after_the_commit(state, event):
    """The next step begins before all have updated."""
    state, actions = advance(state, event)
    return (state._replace(phase=Phase.IDLE) if state.phase is Phase.COMMITTED else state), actions


def abort_after_the_commit(state, event):
    """A death after the commit is treated as one before it."""
    is_committed = state.phase is Phase.COMMITTED
    state, actions = advance(state, event)
    return state, (*actions, Abort(state.attempt)) if isinstance(event, Died) and is_committed else actions


def remember_another_batch(state, event):
    """After an error of the script, its next batch is blamed for the last one."""
    after, actions = advance(state, event)
    given_up = any(isinstance(action, GiveUp) for action in actions)
    return (after._replace(step=state.step, blamed=state.blamed) if given_up else after), actions


MISTAKES = {
    forget_acknowledgements: "an attempt begins while a worker may still use the memory of another",
    go_on_after_the_commit: "an attempt begins while a worker may still use the memory of another",
    commit_without_the_last: "a root counts that is incomplete",
    commit_without_the_dead: "nothing can happen any more, and the work is not done",
    wait_for_the_dead: "nothing can happen any more, and the work is not done",
    keep_the_dead: "nothing can happen any more, and the work is not done",
    admit_at_once: "nothing can happen any more, and the work is not done",
    abort_after_the_commit: "the members disagree about whether a step counts",
    remember_another_batch: "the script gets an error that its own code did not cause",
}


@pytest.mark.parametrize("rules", MISTAKES, ids=lambda rules: rules.__name__)
def test_the_exploration_finds_the_mistake(rules):
    found = explore_case(2, 0, 2, 1, 2, True, rules)
    assert found.violation == MISTAKES[rules], "\n".join(found.moves)


def test_suspicion_ends_with_the_commit():
    """A step may have several passes (`trainer.gradients`), and shard 3 of the next one has other examples."""
    state, _ = advance(Membership(members=frozenset({CONTROLLER, 1})), Begin(0))
    state = state._replace(suspects=frozenset({3}))
    for seat in (CONTROLLER, 1):
        state, _ = advance(state, Ready(seat, state.attempt))
    assert (state.phase, state.suspects) == (Phase.COMMITTED, frozenset())
