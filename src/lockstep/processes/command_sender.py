"""Sends commands to workers, each with what the script has changed since the worker's last command."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.backends.base import Backend
from lockstep.core.batches import Rows, transform
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.data.reader import Readers
from lockstep.launch import shm
from lockstep.launch.shm import Region
from lockstep.processes import commands
from lockstep.processes.commands import Command
from lockstep.processes.input_pipelines import PipelineSender
from lockstep.processes.seats import Seat, Seats
from lockstep.processes.worker_loop import Message, pack_head
from lockstep.training.step import TURN, read_examples

MEMBERS, NEWCOMERS = range(2)  # the numbers of the regions


class CommandSender:
    """Sends commands to the workers in `seats`.

    Arrays are sent in one of the regions. Its previous contents are no longer needed when the next command is sent.
    """

    def __init__(self, backend: Backend, seats: Seats, regions: Sequence[Region], place: tuple[int, int]) -> None:
        self._backend = backend
        self._seats = seats
        self._regions = regions
        self._controls = b""
        self._last_controls: Any = None  # what is pickled there
        self._quiet_period: int | None = None  # of the last step before which changes were looked for
        self._pipelines = PipelineSender()
        self._readers = Readers(place=place)  # not staged: what they read is sent on

    def close(self) -> None:
        """Frees the memory of the pipelines."""
        self._pipelines.close()

    def close_readers(self) -> None:
        """Closes the readers of examples that this process reads for the workers."""
        self._readers.close()

    def pack_step(
        self,
        seats: Sequence[Seat],
        works: Sequence[Work],
        plan: Plan,
        attempt: int,
        members: tuple[int, ...],
        is_observed: bool = False,
    ) -> list[bytes]:
        """Returns the messages of an attempt to make a step, one for each seat."""

        def choose(seat: Seat) -> Command:
            return partial(commands.step, plan if plan != seat.sent.plan else None, is_observed)

        return self._pack(seats, choose, works, MEMBERS, attempt, members)

    def pack(
        self, command: Command, seats: Sequence[Seat], works: Sequence[Work], region: int = MEMBERS
    ) -> list[bytes]:
        """Returns the messages of any other command; raises if something cannot be pickled, before anything is sent."""
        return self._pack(seats, lambda seat: command, works, region)

    def send(self, seats: Sequence[Seat], messages: Sequence[bytes], plan: Plan | None = None) -> list[int]:
        """Sends the messages; `plan` is that of a step. Returns the numbers of the seats whose workers were reached."""
        reached = []
        for seat, data in zip(seats, messages, strict=True):
            try:
                seat.worker.send(data)
            except Exception:  # it has ended, which the coordinator will notice
                continue
            sent = seat.sent
            sent.plan, sent.controls, sent.is_stale = plan or sent.plan, self._controls, False
            sent.last_version, sent.recipe_version = sent.recipe_version, self._seats.recipe_version
            sent.pipelines = self._pipelines.list_numbers()
            reached.append(seat.number)
        return reached

    def _pack(
        self,
        seats: Sequence[Seat],
        choose: Callable[[Seat], Command],
        works: Sequence[Work],
        region: int,
        attempt: int = 0,
        members: tuple[int, ...] = (),
    ) -> list[bytes]:
        if not seats:
            return []
        self._note_changes(seats, works[0])
        version, recipe = self._seats.recipe_version, None
        for sent in (seat.sent for seat in seats if seat.sent.recipe_version != version):
            sent.send_again()  # the model that it gets now has nothing of it
            recipe = recipe or self._seats.dump()
        state = self._backend.state() if any(seat.sent.is_stale for seat in seats) else None
        messages = [
            Message(
                recipe if seat.sent.recipe_version != version else None,
                choose(seat),
                work,
                members,
                self._controls if self._controls != seat.sent.controls else None,
                state if seat.sent.is_stale else None,
                self._pipelines.list_changes(seat.sent.pipelines),
            )
            for seat, work in zip(seats, self._prepare(works), strict=True)
        ]
        head = pack_head(attempt, region)
        return [head + data for data in shm.pack(messages, self._regions[region])]

    def _note_changes(self, seats: Sequence[Seat], work: Work) -> None:
        """Pickles the controls, and marks the workers' state as stale if the script has written to its own.

        In a quiet period the script changes nothing, but an optimizer may count its updates in a parameter group: so
        the controls are read again for a worker that has not made all of these updates.
        """
        backend, period = self._backend, work.quiet_period
        is_quiet = period is not None and period == self._quiet_period
        if is_quiet and not any(seat.sent.is_stale or not seat.sent.controls for seat in seats):
            return
        self._quiet_period = period
        with TURN:
            controls = backend.controls()
            if controls is not self._last_controls:  # the same object if nothing has changed
                self._controls, self._last_controls = pickle.dumps(controls), controls
            if is_quiet:  # the steps have written to the state, and the workers as well
                return
            # Inside, because a comparison of the whole state runs with the threads and switches of a step.
            with backend.computing(work):
                touched = backend.touched()
        if touched:
            for seat in self._seats.taken.values():
                seat.sent.is_stale = True

    def _prepare(self, works: Sequence[Work]) -> list[Work]:
        """Returns the works as they are sent: arrays on the host, each pipeline replaced by its number."""
        rows = [piece for work in works for piece in work.shards.values() if isinstance(piece, Rows)]
        if rows and not rows[0].pipeline.compiled.is_read_in_workers:
            # Read once for all workers: a reader prefetches what would come next, for one caller.
            examples = dict(zip(rows, self._readers.read(rows), strict=True))
            works = [read_examples(work, lambda own: [examples[piece] for piece in own]) for work in works]

        def leaf(value: Any) -> Any:
            return self._pipelines.number(value) if isinstance(value, Rows) else self._backend.host(value)

        return [replace(work, pieces=transform(work.pieces, leaf)) for work in works]
