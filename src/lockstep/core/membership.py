"""Membership: which processes make a step together, and when a step counts.

The protocol is the pure function `advance(state, event) -> (state, actions)`. The controller's process alone runs it
and alone writes the decision about a step, commit or abort, which the workers wait for. So no two processes can
disagree about whether a step was made. docs/design/membership.md has the reasons, and a test explores every
interleaving.

A *seat* is the number of a process: 0 is the controller, the others are workers. A step is tried in *attempts*, which
are numbered through the whole run. An attempt that is aborted has changed no state, and is over once every survivor has
acknowledged the abort: until then one of them may still write to the memory that the next attempt uses.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from lockstep.core.membership_events import (
    Abort,
    Acknowledged,
    Action,
    Admitted,
    Begin,
    Commit,
    Died,
    Event,
    Failed,
    GiveUp,
    Kill,
    LeaveOut,
    Left,
    MadeAlone,
    Ready,
    Refused,
    Replace,
    Retry,
    Start,
    Unusable,
    Updated,
)

CONTROLLER = 0
MAX_FAILURES = 3  # of one seat, without a committed step in between


class Phase(Enum):
    """The phase of the current attempt to make a step."""

    IDLE = "between two steps"
    COMPUTING = "computing"
    ABORTING = "giving the attempt up"
    COMMITTED = "updating"


class Membership(NamedTuple):
    """The state of the protocol; it can be hashed, so that a test can explore every state."""

    members: frozenset[int] = frozenset({CONTROLLER})  # the processes that have the state of the last committed step
    admitted: frozenset[int] = frozenset()  # members from the next step on
    phase: Phase = Phase.IDLE
    attempt: int = 0
    step: int = -1
    pending: frozenset[int] = frozenset()  # the members from whom the phase still needs something
    blamed: frozenset[int] = frozenset()  # workers that have raised in an earlier attempt of this step
    suspects: frozenset[int] = frozenset()  # shards of this step that a process was computing when it died
    verdict: GiveUp | None = None  # if the step is not to be made again
    failures: frozenset[tuple[int, int]] = frozenset()  # (seat, deaths since its last committed step)

    def count_failures(self, seat: int) -> int:
        """Returns how often the worker with this number has died since the last committed step."""
        return dict(self.failures).get(seat, 0)


Result = tuple[Membership, tuple[Action, ...]]


def advance(state: Membership, event: Event) -> Result:
    """Returns the next state of the protocol, and the actions that the controller must now carry out."""
    rule: Callable[[Membership, Event], Result] = _RULES[type(event)]
    return rule(state, event)


def _begin(state: Membership, event: Begin) -> Result:
    assert state.phase is Phase.IDLE, f"an attempt begins while {state.phase.value}"
    if event.step != state.step:
        state = _forget_faults(state)
    members = state.members | state.admitted
    attempt = state.attempt + 1
    state = state._replace(
        members=members,
        admitted=frozenset(),
        phase=Phase.COMPUTING,
        attempt=attempt,
        step=event.step,
        pending=members,
        verdict=None,
    )
    return state, (Start(attempt, tuple(sorted(members))),)


def _made_alone(state: Membership, event: MadeAlone) -> Result:
    return _forget_faults(state)._replace(step=event.step), ()


def _ready(state: Membership, event: Ready) -> Result:
    if state.phase is not Phase.COMPUTING or event.attempt != state.attempt:
        return state, ()
    pending = state.pending - {event.seat}
    if pending:
        return state._replace(pending=pending), ()
    workers = state.members - {CONTROLLER}
    # A shard that raised in one process and not in another shows that the process is at fault.
    at_fault = tuple(Kill(seat) for seat in sorted(state.blamed & workers))
    phase = Phase.COMMITTED if workers else Phase.IDLE
    # A step may have several passes, of different batches: suspicion ends with each commit.
    state = state._replace(phase=phase, pending=workers, suspects=frozenset())
    return state, (Commit(state.attempt), *at_fault)


def _failed(state: Membership, event: Failed) -> Result:
    if event.attempt != state.attempt or state.phase not in (Phase.COMPUTING, Phase.ABORTING):
        return state, ()
    seat, actions = event.seat, tuple[Action, ...]()
    if seat == CONTROLLER or state.blamed - {seat}:  # it has raised in two processes, so it is the user's error
        state = state._replace(verdict=GiveUp())
    elif seat in state.blamed:  # it raised with other shards as well, and no other process has
        actions = (Kill(seat),)
    state = state._replace(blamed=state.blamed | {seat})
    state, more = _abort(state)
    return state, (*actions, *more)


def _refused(state: Membership, event: Refused) -> Result:
    if event.attempt != state.attempt or state.phase not in (Phase.COMPUTING, Phase.ABORTING):
        return state, ()
    return _abort(state._replace(verdict=GiveUp()))


def _acknowledged(state: Membership, event: Acknowledged) -> Result:
    if state.phase is not Phase.ABORTING or event.attempt != state.attempt:
        return state, ()
    return _end_abort(state._replace(pending=state.pending - {event.seat}))


def _updated(state: Membership, event: Updated) -> Result:
    failures = _drop_failures(state, event.seat) if state.failures else state.failures
    return _end_commit(state._replace(pending=state.pending - {event.seat}, failures=failures)), ()


def _died(state: Membership, event: Died) -> Result:
    seat = event.seat
    assert seat != CONTROLLER, "the controller cannot outlive itself"
    was_member = seat in state.members
    count = state.count_failures(seat) + 1
    state = state._replace(
        members=state.members - {seat},
        admitted=state.admitted - {seat},
        pending=state.pending - {seat},
        blamed=state.blamed - {seat},
        failures=_drop_failures(state, seat) | {(seat, count)},
    )
    actions: tuple[Action, ...] = (LeaveOut(seat),) if count >= MAX_FAILURES else (Replace(seat),)
    if was_member and state.phase in (Phase.COMPUTING, Phase.ABORTING) and event.shard is not None:
        if event.shard in state.suspects:
            state = state._replace(verdict=GiveUp(event.shard))
        state = state._replace(suspects=state.suspects | {event.shard})
    if was_member and state.phase is Phase.COMPUTING:
        state, more = _abort(state)
    elif state.phase is Phase.ABORTING:
        state, more = _end_abort(state)
    else:
        state, more = _end_commit(state), ()
    return state, (*actions, *more)


def _unusable(state: Membership, event: Unusable) -> Result:
    return state, (Kill(event.seat),)


def _left(state: Membership, event: Left) -> Result:
    assert state.phase is Phase.IDLE, f"a process leaves while {state.phase.value}"
    gone = {event.seat}
    state = state._replace(members=state.members - gone, admitted=state.admitted - gone, blamed=state.blamed - gone)
    return state._replace(failures=_drop_failures(state, event.seat)), ()


def _admitted(state: Membership, event: Admitted) -> Result:
    return state._replace(admitted=state.admitted | {event.seat}), ()


def _abort(state: Membership) -> Result:
    """Ends the attempt; the controller need not acknowledge, because it stops its own work to write the abort."""
    if state.phase is Phase.ABORTING:
        return state, ()
    state = state._replace(phase=Phase.ABORTING, pending=state.members - {CONTROLLER})
    state, more = _end_abort(state)
    return state, (Abort(state.attempt), *more)


def _end_abort(state: Membership) -> Result:
    if state.phase is not Phase.ABORTING or state.pending:
        return state, ()
    if state.verdict is None:
        return state._replace(phase=Phase.IDLE), (Retry(),)
    # The next attempt is another step for the user, who may give other examples.
    return _forget_faults(state)._replace(phase=Phase.IDLE), (state.verdict,)


def _forget_faults(state: Membership) -> Membership:
    """Forgets in which shards processes have failed or died, because this only concerns one step."""
    return state._replace(blamed=frozenset(), suspects=frozenset()) if state.blamed or state.suspects else state


def _drop_failures(state: Membership, seat: int) -> frozenset[tuple[int, int]]:
    return frozenset(each for each in state.failures if each[0] != seat)


def _end_commit(state: Membership) -> Membership:
    over = state.phase is Phase.COMMITTED and not state.pending
    return state._replace(phase=Phase.IDLE) if over else state


_RULES: Mapping[type, Callable[..., Result]] = {
    Begin: _begin,
    MadeAlone: _made_alone,
    Ready: _ready,
    Failed: _failed,
    Refused: _refused,
    Acknowledged: _acknowledged,
    Updated: _updated,
    Died: _died,
    Unusable: _unusable,
    Left: _left,
    Admitted: _admitted,
}
