"""Admits new workers: each is started, proves that it computes the controller's bits, and then joins every step."""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.core.lateness import Deadline
from lockstep.core.membership import CONTROLLER, MAX_FAILURES
from lockstep.core.membership_events import Admitted
from lockstep.core.types import Phases, Work
from lockstep.processes import commands
from lockstep.processes.command_sender import NEWCOMERS, CommandSender
from lockstep.processes.coordinator import Coordinator
from lockstep.processes.seats import Loss, Seat, Seats, Stage
from lockstep.training.step import Member

_SECONDS_TO_NOTICE = 15.0
_SECONDS_BETWEEN_LOOKS = 0.002
_LONGEST_STAGE = 300.0  # seconds; a large framework on a slow disk takes a minute to import


class Newcomers:
    """Replaces workers that have ended, and takes each new one through its stages, between two commands.

    No step waits for a worker that replaces another: between commands it is checked whether the worker has answered.
    """

    def __init__(
        self,
        seats: Seats,
        sender: CommandSender,
        coordinator: Coordinator,
        member: Member,
        report: Callable[[str], None],
        deadline: Deadline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seats = seats
        self._sender = sender
        self._coordinator = coordinator
        self._member = member
        self._report = report
        self._clock = clock
        self._longest_stage = max(_LONGEST_STAGE, deadline.shortest)
        self._vacant: list[int] = []  # the seats in which another process is to be started

    def update(self) -> list[Loss]:
        """Starts replacements for workers that have died, and admits ready ones; returns those that have died."""
        self._coordinator.look_for_deaths()
        losses, self._coordinator.losses = self._coordinator.losses, []
        for loss in losses:
            self._explain(loss)
            self._seats.release(loss.seat)
        self._vacant += [loss.seat for loss in losses if loss.is_replaced]
        if self._vacant and not self._coordinator.is_retrying:  # the survivors make their step first
            vacant, self._vacant = self._vacant, []  # the script may have changed the devices since
            seats = range(len(self._seats.devices))
            self._replace([seat for seat in vacant if seat in seats and seat not in self._seats.taken])
        for seat in self._seats.select(Stage.STARTING, Stage.PROVING):
            self._look_at(seat)
        return losses

    def _look_at(self, seat: Seat) -> None:
        """Takes a worker to its next stage if it has answered; ends it if it takes too long."""
        if seat.is_waited_for:
            self._wait_for(seat)
        elif seat.worker.has_message():
            receive = self._receive_start if seat.stage is Stage.STARTING else self._receive_proof
            receive(seat)
        elif (seconds := self._clock() - seat.since) > self._longest_stage:
            self._coordinator.kill(seat.number, f"{seat.name} is ended: for {seconds:.0f} s it {seat.stage.value}")

    def _replace(self, numbers: Sequence[int]) -> None:
        try:
            self._seats.start(numbers)
        except Exception as error:  # the model cannot be pickled any more, for example
            names = " and ".join(self._seats.devices[number] for number in numbers)
            self._report(f"{names} is left out, because another process cannot be started there: {error}")

    def _wait_for(self, seat: Seat) -> None:
        """Waits for a worker that was started with the trainer; after a while, prints a line that says so."""
        while not seat.worker.has_message():
            if not seat.is_announced and self._clock() - seat.since > _SECONDS_TO_NOTICE:
                seat.is_announced = True
                self._report(f"waiting for {seat.name}, which {seat.stage.value}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        seat.worker.receive()
        self._coordinator.watch(seat.number)
        self._admit(seat)

    def send_proof(self, work: Work) -> Work:
        """Sends the controller's first shard to a waiting worker, as a proof; returns the work with its examples."""
        waiting = self._seats.select(Stage.WAITING)
        if (
            not waiting
            or work.phases is Phases.UPDATE
            or work.num_shards == 1
            or not work.shards
            or self._seats.select(Stage.PROVING)
        ):
            return work
        seat, work = waiting[0], self._member.read(work)
        shard, piece = next(iter(work.shards.items()))
        # In a region of its own, because members read the other one while this worker may still compute. Packed before
        # this process computes, because what the script has changed must be found before a pass changes more.
        proof = replace(work, pieces={seat.number: {shard: piece}})
        messages = self._sender.pack(commands.prove, [seat], [proof], NEWCOMERS)
        seat.proof = commands.prove(self._member, replace(work, pieces={CONTROLLER: {shard: piece}}))
        self._sender.send([seat], messages)
        seat.enter(Stage.PROVING, self._clock())
        return work

    def _explain(self, loss: Loss) -> None:
        """Prints which worker has ended and how, unless printed before, and which devices compute its shards."""
        seat = self._seats.taken[loss.seat]
        members = self._coordinator.state.members
        others = " and ".join(self._seats.devices[each] for each in sorted(members))
        if not loss.is_explained:
            shards = f"; its shards go to {others}" if seat.stage is Stage.MEMBER else ", before it took part"
            self._report(f"{seat.name} {seat.worker.describe_end()} {loss.when}{shards}")
        if not loss.is_replaced:
            self._report(
                f"{self._seats.devices[loss.seat]} is left out: {MAX_FAILURES} of its processes have ended without a "
                f"step in between. Training goes on with {others}"
            )

    def _receive_start(self, seat: Seat) -> None:
        """Receives the message that says that a worker has its model."""
        try:
            seat.worker.receive()
        except Exception as error:
            self._coordinator.kill(seat.number, f"{seat.name} could not start: {error}")
        else:
            self._coordinator.watch(seat.number)
            seat.enter(Stage.WAITING, self._clock())

    def _receive_proof(self, seat: Seat) -> None:
        """Admits a worker if its shard has the controller's bits."""
        try:
            found = pickle.loads(seat.worker.receive())
        except Exception as error:
            if seat.worker.has_ended():  # which the coordinator notices
                return
            self._coordinator.kill(seat.number, f"{seat.name} could not compute a shard: {error}")
            return
        if found == seat.proof:
            seat.sent.is_stale = True  # steps were made since
            self._admit(seat)
            self._report(f"{seat.name} takes part from step {self._coordinator.state.step + 1} on")
        else:
            self._coordinator.kill(
                seat.number,
                f"{seat.name} computed other bits for one shard than this process, so it takes no part. Look for what "
                "differs between the two: values that the model or the loss has in globals, attributes or closures",
            )

    def _admit(self, seat: Seat) -> None:
        seat.stage = Stage.MEMBER
        self._coordinator.apply(Admitted(seat.number))
