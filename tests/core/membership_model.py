"""A model of all processes of a run around core/membership.py, for an exhaustive exploration.

The rules of the protocol are the real ones. The model is what carries them out: the controller's way through a step, as
processes/coordinator.py goes it, the workers' (exchange/barrier.py), the words in shared memory, and the processes,
which may end at any moment. An event waits until the controller looks for it, which it does when it waits, in any
order. After an error that the protocol gives up on, the script goes on with another batch for the same step.
"""

from collections.abc import Iterator
from typing import NamedTuple

from core.exploration import require
from lockstep.core.membership import CONTROLLER, Membership, Phase, advance
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
    Ready,
    Refused,
    Start,
    Unusable,
    Updated,
)

SHARD = 7  # the one that processes die of, if they die of one
GONE = {"place": "absent", "updates": 0, "attempt": 0, "members": (), "detail": None}
DEAD = GONE | {"place": "dead"}
NO_PROCESS = ("absent", "left out", "dead")
BUSY = "an attempt begins while a worker may still use the memory of another"
WORKING = ("sent", "computing", "summed", "adding", "ready", "updating")  # on the attempt that the process began


class Worker(NamedTuple):
    """The process in a worker's seat.

    `place` is "absent", "left out", "dead" (not noticed yet), "arrived" (no member yet), "idle", "answered", or how far
    it is in a step. `updates` counts the steps that its state has.
    """

    place: str
    updates: int = 0
    attempt: int = 0
    members: tuple[int, ...] = ()  # of the attempt
    detail: str | int | None = None  # the answer, or the shard that a dead process was computing


class World(NamedTuple):
    """Everything that can differ between two moments of a run."""

    workers: tuple[Worker, ...]  # by seat; the first is the controller's and stays empty
    faults: int  # that can still happen
    arrivals: int  # processes that can still be started
    state: Membership
    place: str = "between"  # how far the controller is
    updates: int = 0  # of the controller's own state
    commits: int = 0
    members: tuple[int, ...] = ()  # of the attempt
    decision: int = 0
    summed: tuple[int, ...] = (0, 0, 0)
    ready: tuple[int, ...] = (0, 0, 0)
    failed: tuple[int, ...] = (0, 0, 0)
    refused: tuple[int, ...] = (0, 0, 0)
    raised: frozenset[int] = frozenset()  # the seats whose processes have raised with this batch
    deaths: int = 0  # that the controller has noticed of a shard of this batch

    def set_worker(self, seat: int, **changes: object) -> "World":
        """Returns the world with another worker in this seat."""
        return self._replace(workers=put(self.workers, seat, self.workers[seat]._replace(**changes)))

    def write(self, word: str, seat: int, value: int) -> "World":
        """Returns the world in which a process has written one of its words."""
        return self._replace(**{word: put(getattr(self, word), seat, value)})


Move = tuple[str, bool, World]  # what happens, whether it is a fault, and the world after it


def put(values: tuple, index: int, value: object) -> tuple:
    """Returns the tuple with one value replaced."""
    return (*values[:index], value, *values[index + 1 :])


class Model:
    """All moves that are possible in a world, under the given rules.

    With `is_kill_noticed` the controller applies the death of a process that it kills at once, as Coordinator does.
    """

    def __init__(self, num_steps: int = 2, rules=advance, is_kill_noticed: bool = True) -> None:
        self._num_steps = num_steps
        self._rules = rules
        self._is_kill_noticed = is_kill_noticed

    def open(self, members: int, newcomers: int, faults: int, arrivals: int) -> World:
        """Returns the world in which `members` - 1 workers are members, and further ones have arrived."""
        places = ["absent"] + ["idle"] * (members - 1) + ["arrived"] * newcomers
        workers = tuple(Worker(place) for place in [*places, "absent", "absent"][:3])
        return World(workers, faults, arrivals, Membership(frozenset(range(members))))

    def is_final(self, world: World) -> bool:
        """Returns whether all steps are made."""
        return world.place == "between" and world.updates == self._num_steps

    def check(self, world: World) -> None:
        """Raises `Violation` if the world is one that must not be reached."""
        alive = [worker for worker in world.workers if worker.place not in NO_PROCESS]
        attempts = {worker.attempt for worker in alive if worker.place in WORKING}
        attempts |= {world.state.attempt} if world.place in WORKING else set()
        require(len(attempts) <= 1, "two attempts at once use the same memory")
        require(all(worker.updates <= world.commits for worker in alive), "a worker counts a step that nobody commits")
        if world.place == "between":
            require(world.updates == world.commits, "the members disagree about whether a step counts")
            for worker in [world.workers[seat] for seat in world.state.members]:
                equal = worker.place != "idle" or worker.updates == world.updates
                require(equal, "the members disagree about whether a step counts")

    def list_moves(self, world: World) -> Iterator[Move]:
        """Yields every move that is possible."""
        if self.is_final(world):
            return
        yield from self._list_controller_moves(world)
        for seat, worker in enumerate(world.workers):
            if seat != CONTROLLER and worker.place not in NO_PROCESS:
                yield from self._list_worker_moves(world, seat, worker)

    # -- a worker, as exchange/barrier.py and training/step.py have it

    def _list_worker_moves(self, world: World, seat: int, worker: Worker) -> Iterator[Move]:
        name, attempt, place = f"worker {seat}", worker.attempt, worker.place
        answered = {"place": "answered", "members": ()}
        if place == "sent":
            yield f"{name} computes", False, world.set_worker(seat, place="computing")
        if place == "computing":
            after = world.write("summed", seat, attempt)
            yield f"{name} has its sums", False, after.set_worker(seat, place="summed")
        if place == "summed" and all(world.summed[each] == attempt for each in worker.members):
            yield f"{name} adds its slice", False, world.set_worker(seat, place="adding")
        if place == "adding":
            after = world.write("ready", seat, attempt)
            yield f"{name} has its slice", False, after.set_worker(seat, place="ready")
        if place == "ready" and world.decision == 2 * attempt + 1:
            yield f"{name} sees the commit", False, world.set_worker(seat, place="updating")
        if place == "updating":
            require(all(world.ready[each] == attempt for each in worker.members), "a root is read that is incomplete")
            require(worker.updates == world.commits - 1, "a worker skips or repeats a step")
            after = world.set_worker(seat, **answered, detail="updated", updates=worker.updates + 1)
            yield f"{name} updates", False, after
        if place in ("computing", "summed", "ready") and world.decision == 2 * attempt:
            yield f"{name} sees the abort", False, world.set_worker(seat, **answered, detail="aborted")
        if not world.faults:
            return
        world = world._replace(faults=world.faults - 1)
        if place == "sent":
            after = world.write("refused", seat, attempt).set_worker(seat, **answered, detail="raised")
            yield f"{name} cannot read its command", True, after._replace(raised=world.raised | {CONTROLLER})
        if place in ("computing", "adding"):
            after = world.write("failed", seat, attempt)
            after = after.set_worker(seat, **answered, detail="raised")
            yield f"{name} raises", True, after._replace(raised=world.raised | {seat})
        if place == "updating":
            yield f"{name} raises in its update", True, world.set_worker(seat, **answered, detail="raised")
        yield f"{name} dies", True, world.set_worker(seat, **DEAD)
        if place == "computing":
            yield f"{name} dies of a shard", True, world.set_worker(seat, **DEAD | {"detail": SHARD})

    # -- the controller, as processes/coordinator.py and processes/local_workers.py have it

    def _list_controller_moves(self, world: World) -> Iterator[Move]:
        attempt, place = world.state.attempt, world.place
        if place == "between":
            yield from self._list_moves_between_steps(world)
        if place == "computing":
            yield "controller has its sums", False, world.write("summed", CONTROLLER, attempt)._replace(place="summed")
        if place == "summed" and all(world.summed[seat] == attempt for seat in world.members):
            yield "controller adds its slice", False, world._replace(place="adding")
        if place == "adding":
            after = world.write("ready", CONTROLLER, attempt)._replace(place="ready")
            yield "controller has its slice", False, self._apply(after, Ready(CONTROLLER, attempt))
        if place == "updating":
            require(all(world.ready[seat] == attempt for seat in world.members), "a root is read that is incomplete")
            after = world._replace(place="collecting", updates=world.updates + 1, raised=frozenset(), deaths=0)
            yield "controller updates", False, self._settle(after)
        if place in ("computing", "adding") and world.faults:
            raised = world.raised | {CONTROLLER}
            after = world._replace(place="collecting", faults=world.faults - 1, raised=raised)
            yield "controller raises", True, self._apply(after, Failed(CONTROLLER, attempt))
        if place in ("between", "summed", "ready", "collecting"):
            for seat, worker in enumerate(world.workers):
                if seat != CONTROLLER:
                    yield from self._list_events(world, seat, worker)

    def _list_moves_between_steps(self, world: World) -> Iterator[Move]:
        if world.state.members | world.state.admitted == {CONTROLLER}:
            after = world._replace(updates=world.updates + 1, commits=world.commits + 1, raised=frozenset(), deaths=0)
            yield "controller makes the step alone", False, after
        else:
            yield "controller begins", False, self._apply(world._replace(place="computing"), Begin(world.updates))
        for seat, worker in enumerate(world.workers):
            if world.arrivals and seat != CONTROLLER and worker.place == "absent":
                after = world._replace(arrivals=world.arrivals - 1).set_worker(seat, place="arrived", detail=None)
                for word in ("summed", "ready", "failed", "refused"):
                    after = after.write(word, seat, 0)
                yield f"worker {seat} arrives", False, after
            if world.faults and seat != CONTROLLER and worker.place not in ("absent", "left out"):
                after = world.set_worker(seat, **GONE)._replace(faults=world.faults - 1, raised=world.raised - {seat})
                yield f"worker {seat} is not wanted any more", True, self._apply(after, Left(seat))

    def _list_events(self, world: World, seat: int, worker: Worker) -> Iterator[Move]:
        """Yields what the controller can learn about one worker while it waits."""
        state, alive = world.state, worker.place not in NO_PROCESS
        if worker.place == "dead":
            yield f"controller notices the death of {seat}", False, self._settle(self._notice_death(world, seat))
        if world.ready[seat] and world.place == "ready":
            yield f"controller sees {seat} ready", False, self._apply(world, Ready(seat, world.ready[seat]))
        if seat in state.members and state.phase is Phase.COMPUTING:
            if world.refused[seat]:
                yield f"controller sees {seat} refuse", False, self._apply(world, Refused(seat, world.refused[seat]))
            if world.failed[seat]:
                yield f"controller sees {seat} failed", False, self._apply(world, Failed(seat, world.failed[seat]))
        if worker.place == "arrived" and seat not in state.admitted:
            yield f"controller admits {seat}", False, self._apply(world, Admitted(seat))
        if worker.place == "answered" and world.place == "collecting":
            after, label = world.set_worker(seat, place="idle", detail=None), f"controller reads the answer of {seat}"
            if state.phase is Phase.ABORTING:
                yield label, False, self._apply(after, Acknowledged(seat, state.attempt))
            elif worker.detail == "raised":
                yield label, False, self._apply(after, Unusable(seat))
            else:
                yield label, False, self._apply(after, Updated(seat))
        if alive and world.faults:
            after = world._replace(faults=world.faults - 1)
            yield f"controller finds {seat} late", True, self._apply(after, Unusable(seat))

    # -- the actions

    def _apply(self, world: World, event: Event) -> World:
        return self._settle(self._advance_world(world, event))

    def _advance_world(self, world: World, event: Event) -> World:
        state, actions = self._rules(world.state, event)
        world = world._replace(state=state)
        if isinstance(event, Died):
            world = world._replace(raised=world.raised - {event.seat}, deaths=world.deaths + (event.shard == SHARD))
        for action in actions:
            if isinstance(action, Kill) and not isinstance(event, Unusable):
                require(action.seat in world.raised, "a worker is killed for what it did not do in this step")
            world = self._carry_out(world, action)
        return world

    def _notice_death(self, world: World, seat: int) -> World:
        shard = world.workers[seat].detail
        return self._advance_world(world.set_worker(seat, place="absent", detail=None), Died(seat, shard))

    def _carry_out(self, world: World, action: Action) -> World:
        match action:
            case Start(attempt, members):
                for seat in set(members) - {CONTROLLER}:
                    worker = world.workers[seat]
                    if worker.place not in NO_PROCESS:
                        require(worker.place in ("idle", "arrived"), BUSY)
                        updates = world.updates if worker.place == "arrived" else worker.updates
                        world = world.set_worker(seat, place="sent", updates=updates, attempt=attempt, members=members)
                return world._replace(members=members)
            case Commit(attempt):
                require(world.state.step == world.commits, "a step is lost or made twice")
                require(all(world.ready[seat] == attempt for seat in world.members), "a root counts that is incomplete")
                return world._replace(decision=2 * attempt + 1, commits=world.commits + 1)
            case Abort(attempt):
                return world._replace(decision=2 * attempt)
            case Kill(seat):
                shard = SHARD if world.workers[seat].place == "computing" else None
                world = world.set_worker(seat, **DEAD | {"detail": shard})
                return self._notice_death(world, seat) if self._is_kill_noticed else world
            case GiveUp(shard):
                at_fault = world.deaths > 1 if shard else CONTROLLER in world.raised or len(world.raised) > 1
                require(at_fault, "the script gets an error that its own code did not cause")
                return world._replace(raised=frozenset(), deaths=0)
            case LeaveOut(seat):
                return world.set_worker(seat, place="left out")
        return world

    def _settle(self, world: World) -> World:
        """Returns the world in which the controller's own way has followed the phase."""
        phase, attempt = world.state.phase, world.state.attempt
        if world.place in ("summed", "ready") and phase is not Phase.COMPUTING:
            world = world._replace(place="updating" if world.decision == 2 * attempt + 1 else "collecting")
        if world.place == "collecting" and phase is Phase.IDLE:
            world = world._replace(place="between")
        return world
