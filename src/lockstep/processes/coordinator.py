"""The controller's side of a step: waits for the workers, detects dead and late ones, and decides about the step.

core/membership.py decides. This class turns words in shared memory, ends of processes and answers into events of that
protocol, and carries out its actions. A process is given by its seat: 0 is the controller, the others are workers.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lockstep.core.lateness import Deadline, Wait
from lockstep.core.membership import CONTROLLER, Membership, Phase, advance
from lockstep.core.membership_events import (
    Abort,
    Acknowledged,
    Action,
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
    Unusable,
    Updated,
)
from lockstep.errors import AttemptAborted, WorkerError
from lockstep.exchange.barrier import StepWords
from lockstep.launch.shm import Region
from lockstep.processes.process_watch import ProcessWatch
from lockstep.processes.seats import Loss, Seat


class Coordinator:
    """The membership of a run, and the controller's end of the barrier.

    `workers` are all workers by seat, members or not; the code that reads `losses` must release the workers that have
    ended. `report` prints a line for the user.
    """

    def __init__(
        self,
        region: Region,
        eventfds: Sequence[int],
        workers: Mapping[int, Seat],
        report: Callable[[str], None],
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = Membership()
        self.errors: dict[int, Exception] = {}  # what the last command has raised, by seat
        self.losses: list[Loss] = []
        self.is_retrying = False  # whether a step was aborted that is to be made again
        self._step_errors: dict[int, Exception] = {}  # of all attempts of the step, by seat
        self._began = 0.0  # the last attempt
        self.step_seconds = 0.0  # from there to the commit
        self._death_time = ""  # of the last worker that has ended, in words
        self._killed: set[int] = set()  # by this process, which has said why
        self._expected: set[int] = set()  # the seats that have not answered the last command
        self._words = StepWords(region, len(eventfds))
        self._eventfds = eventfds
        self._workers = workers
        self._report, self._deadline, self._clock = report, deadline, clock
        self._given_up: GiveUp | None = None
        self._watch = ProcessWatch(eventfds[CONTROLLER])

    def watch(self, seat: int) -> None:
        """Watches a worker from now on, to detect its death."""
        self._words.clear(seat)
        self._watch.add(seat, self._workers[seat].worker.pidfd)

    def dismiss(self, seat: int) -> None:
        """Removes a worker from the members between two steps, before the worker is released."""
        self._watch.remove(seat)
        self.losses = [loss for loss in self.losses if loss.seat != seat]
        self.apply(Left(seat))

    def apply(self, event: Event) -> None:
        """Advances the protocol by one event, and carries out the actions that follow."""
        self.state, actions = advance(self.state, event)
        for action in actions:
            self._carry_out(action)

    def kill(self, seat: int, why: str) -> None:
        """Ends a process that cannot go on as a member."""
        self._report(why)
        self.apply(Unusable(seat))

    def begin(self, step: int) -> None:
        """Begins the next attempt to make a step."""
        if step != self.state.step or self._given_up is not None:
            self._step_errors = {}
        self._given_up = None
        self._began = self._clock()
        self.apply(Begin(step))

    def note_step_alone(self, step: int) -> None:
        """Records a step that the controller has made without workers."""
        self.apply(MadeAlone(step))
        self.is_retrying = False

    def wait_for_sums(self) -> None:
        """Reports that the controller's partial sums are complete, and blocks until all are."""
        attempt, members = self.state.attempt, sorted(self.state.members)
        self._words.summed[CONTROLLER] = attempt
        self._signal(members)
        wait = self._start_wait()
        while missing := [seat for seat in members if self._words.summed[seat] != attempt]:
            self._sleep(wait, missing)
            self._require_attempt()

    def commit(self) -> None:
        """Commits the step once every member has added its slice of the sum over all shards."""
        attempt = self.state.attempt
        self.apply(Ready(CONTROLLER, attempt))
        self._look_for_failures()  # those that `wait_for_sums` has ignored, whose signal it has read
        wait = self._start_wait()
        while self.state.phase is Phase.COMPUTING:
            ready = [seat for seat in self.state.pending if self._words.ready[seat] == attempt]
            for seat in ready:
                self.apply(Ready(seat, attempt))
            if not ready:
                self._sleep(wait, sorted(self.state.pending))
        self._require_attempt()
        self.step_seconds = self._clock() - self._began
        self._deadline.add_step(self.step_seconds)

    def fail(self) -> None:
        """Aborts the step, because the controller's own part has failed."""
        self.apply(Failed(CONTROLLER, self.state.attempt))

    def note_shard(self, shard: int) -> None:
        """Does nothing: the controller watches the other processes only once it has computed its own shards."""

    @property
    def is_committed(self) -> bool:
        """Whether the last attempt was committed."""
        return self._words.is_committed(self.state.attempt)

    def expect(self, seats: Iterable[int]) -> None:
        """Records which workers were sent a command, so that `collect` waits for their answers."""
        self._expected = set(seats)
        self.errors = {}

    def collect(self) -> dict[int, Any]:
        """Waits for the answers to the last command; returns them by seat. `errors` has the exceptions of workers.

        A member's answer to an aborted step acknowledges that it has stopped working on it.
        """
        answers: dict[int, Any] = {}
        wait = self._start_wait()
        while due := sorted(self._list_due()):
            for seat in due:
                if self._workers[seat].worker.has_message():
                    self._read_answer(seat, answers)
            if due == sorted(self._list_due()):
                self._sleep(wait, due, [self._workers[seat].worker.fileno() for seat in due])
        return answers

    def _list_due(self) -> set[int]:
        return self._expected | (self.state.pending if self.state.phase in (Phase.ABORTING, Phase.COMMITTED) else set())

    def raise_if_given_up(self) -> None:
        """Raises the step's error if the aborted step must not be tried again."""
        given_up = self._given_up
        if given_up is None:
            return
        if given_up.shard is not None:
            raise WorkerError(
                f"Two processes ended while they computed shard {given_up.shard} of step {self.state.step}, so the "
                "shard was not tried in the script's own process. The model is as it was before the step. Look at the "
                "shard's examples, at the code that computes them, and at the memory that they need."
            )
        if self._step_errors:
            raise next(iter(self._step_errors.values()))

    def _read_answer(self, seat: int, answers: dict[int, Any]) -> None:
        worker = self._workers[seat].worker
        try:
            answer = pickle.loads(worker.receive())
        except Exception as error:
            if worker.has_ended():
                self._note_death(seat)
                return
            self._expected.discard(seat)
            self._workers[seat].sent.send_again()
            self.errors[seat] = error
            if self.state.phase is Phase.COMMITTED:
                self.kill(seat, f"{self._describe(seat)} could not update in step {self.state.step}: {error}")
                return
            if self.state.phase is Phase.ABORTING:
                self._step_errors.setdefault(seat, error)
                if seat not in self.state.blamed:  # the attempt was given up for another reason first
                    self.apply(Failed(seat, self.state.attempt))
        else:
            self._expected.discard(seat)
            answers[seat] = answer
        if self.state.phase is Phase.ABORTING:
            self.apply(Acknowledged(seat, self.state.attempt))
        elif self.state.phase is Phase.COMMITTED:
            self.apply(Updated(seat))

    def _start_wait(self) -> Wait:
        return Wait(self._clock(), self._deadline.get_seconds(), self._deadline.notice)

    def _sleep(self, wait: Wait, missing: Sequence[int], channels: Sequence[int] = ()) -> None:
        """Blocks until a process signals, answers, ends or is late, and applies what has happened."""
        ended = self._watch.wait(wait.get_timeout(self._clock()), channels)
        for seat in ended or ():
            self._note_death(seat)
        self._look_for_failures()
        if ended is None:
            self._look_for_late(wait, missing)

    def look_for_deaths(self) -> None:
        """Detects workers that have died, without waiting."""
        for seat in self._watch.wait(0.0) or ():
            self._note_death(seat)

    def _look_for_failures(self) -> None:
        attempt, words = self.state.attempt, self._words
        workers = sorted(self.state.members - {CONTROLLER})
        if words.summed[CONTROLLER] == attempt and CONTROLLER in self.state.pending:
            # What a worker raised after it had all sums, this process, which has them too, may be about to raise.
            workers = [seat for seat in workers if words.summed[seat] != attempt]
        for seat in workers:
            if self.state.phase is Phase.COMPUTING and words.refused[seat] == attempt:
                self.apply(Refused(seat, attempt))
            if self.state.phase is Phase.COMPUTING and words.failed[seat] == attempt:
                self.apply(Failed(seat, attempt))

    def _look_for_late(self, wait: Wait, missing: Sequence[int]) -> None:
        now = self._clock()
        if missing and wait.is_notice_due(now):
            names = " and ".join(self._describe(seat) for seat in missing)
            self._report(f"waiting for {names} in step {self.state.step}, {self.state.phase.value}")
        if missing and wait.is_over(now):
            for seat in missing:
                self.kill(seat, f"{self._describe(seat)} is ended: no answer for {now - wait.began:.0f} s")

    def _require_attempt(self) -> None:
        if self.state.phase is not Phase.COMPUTING and not self.is_committed:
            raise AttemptAborted

    def _note_death(self, seat: int) -> None:
        when = "after" if self.state.phase in (Phase.IDLE, Phase.COMMITTED) else "in"
        self._death_time = f"{when} step {self.state.step}" if self.state.step >= 0 else "before the first step"
        self._watch.remove(seat)
        self._expected.discard(seat)
        self.apply(Died(seat, self._words.get_shard(seat)))

    def _describe(self, seat: int) -> str:
        shard = self._words.get_shard(seat)
        return self._workers[seat].name + ("" if shard is None else f", which computes shard {shard},")

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Commit | Retry | GiveUp):
            self.is_retrying = isinstance(action, Retry)
        match action:  # of Start the caller sends the work
            case Commit(attempt):
                self._words.decide(attempt, True)
                self._signal(self.state.members)
            case Abort(attempt):
                self._words.decide(attempt, False)
                self._signal(self.state.members)
            case Kill(seat):
                if seat in self.state.blamed:
                    error = self._step_errors.get(seat)
                    is_committed = self.state.phase is Phase.COMMITTED
                    other = "the same shards raised nothing in another process" if is_committed else "again with others"
                    self._report(
                        f"{self._workers[seat].name} is replaced: it raised {type(error).__name__} in step "
                        f"{self.state.step}, and {other}: {error}"
                    )
                self._killed.add(seat)
                self._watch.remove(seat)
                self._workers[seat].worker.stop()
                self._note_death(seat)
            case Replace(seat) | LeaveOut(seat):
                shard, is_killed = self._words.get_shard(seat), seat in self._killed
                self.losses.append(Loss(seat, shard, self._death_time, is_killed, isinstance(action, Replace)))
                self._killed.discard(seat)
            case GiveUp():
                self._given_up = action

    def _signal(self, seats: Iterable[int]) -> None:
        for seat in seats:
            if seat != CONTROLLER:
                os.eventfd_write(self._eventfds[seat], 1)
