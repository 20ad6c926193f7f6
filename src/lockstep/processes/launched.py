"""Processes that torchrun, SLURM, MPI or the script itself launched; this one is one of them.

Every process runs the whole script and reads whole batches, or of a pipeline its own shards. The state, and what
callbacks decide, are taken from the first; a fingerprint of each batch travels ahead of the step, and a mismatch stops
the run.
"""

import hashlib
import pickle
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from lockstep.backends.base import Backend, Work
from lockstep.core import batches
from lockstep.core.batches import Rows
from lockstep.core.plan import Plan
from lockstep.data.reader import Readers
from lockstep.errors import ExactError, PeerFailed, WorkerError
from lockstep.exchange.torch_distributed import DistributedExchange, ProcessGroup
from lockstep.launch.signals import StopRequested
from lockstep.processes.base import Value
from lockstep.processes.commands import Command, name_command
from lockstep.training.step import Member

# In the place of a call's name.
ABANDONED = -1
TERMINATED = -2


class LaunchedProcesses:
    """One process of a launched world."""

    closed = False

    def __init__(self, backend: Backend, wire: ProcessGroup, device: str) -> None:
        self._backend = backend
        self._wire = wire
        self._calling = False  # whether a call is under way, or has failed: the others know then
        places: list[tuple[str, str]] = wire.gather_objects((device, platform.node()))
        self._readers = Readers(backend.stage, _place_on_host([host for _, host in places], wire.index))
        self.member = Member(
            backend, lambda plan: DistributedExchange(backend, wire, plan), [wire.index], self._readers.read
        )
        self.devices = tuple(device for device, _ in places)
        self.first = wire.index == 0
        self._take_state()

    def replicas(self) -> list[list[int]]:
        """Return one number for each process."""
        return [[index] for index in range(len(self.devices))]

    def ready(self) -> None:
        """Nothing to wait for: the processes met when this object was made."""

    @contextmanager
    def step(self, works: list[Work], plan: Plan) -> Iterator[Work]:
        """Compare the batch with that of the other processes, and hand out this process's part."""
        with self._call():
            self._agree_on("step", works)
            yield self._own(works)

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Return all answers, in every process; one that fails still meets the others."""
        call = name_command(command)
        with self._call():
            self._agree_on(call, works)
            answer: Any = None
            failed: Exception | None = None
            try:
                answer = command(self.member, self._own(works))
            except Exception as error:
                failed = error
            answers: list[Any] = self._wire.gather_objects(answer)
            if failed is not None:
                raise failed
            for index, each in enumerate(answers):
                if each is None:
                    raise PeerFailed(
                        f"Every process takes part. Process {index} failed in {call}; its output says why."
                    )
            return answers

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Return whether the first process stops, and whether any got SIGTERM: a launcher may signal only some."""
        with self._call():
            everyone = self._meet("agree", int(stop), int(terminated), 0)
        return bool(everyone[0][1]), any(terminated for _, _, terminated, _ in everyone)

    def share(self, make: Callable[[], Value]) -> Value:
        """Return what the first process makes; the others wait for it."""
        with self._call():
            self._meet("share", 0, 0, 0)
            outcome: tuple[Value | None, Exception | None] = (None, None)
            if self.first:
                try:
                    outcome = make(), None
                except Exception as error:
                    outcome = None, error
            value, failed = self._wire.broadcast(outcome)
            if failed is not None:
                raise failed
        shared: Value = value
        return shared

    def settle(self) -> None:
        """Take over the first process's state and controls, if it has changed them."""
        with self._call():
            self._agree_on("settle", [])

    def abandon(self, terminated: bool = False) -> None:
        """Come to the others' next call with this news alone; if a call itself failed, they have it already."""
        if not self._calling:
            with suppress(WorkerError):
                self._wire.gather([TERMINATED if terminated else ABANDONED, 0, 0, 0])

    def close(self) -> None:
        """Let go of memory and readers; the process group stays, for another trainer may use it."""
        self._readers.close()
        self.member.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._calling = True
        yield
        self._calling = False

    def _own(self, works: Sequence[Work]) -> Work:
        """Return this process's part; it can read the first shard, because each has the whole batch or its rows."""
        piece = works[0].shards.get(0)
        return replace(
            works[self._wire.index], first=lambda: self._readers.read([piece])[0] if isinstance(piece, Rows) else piece
        )

    def _agree_on(self, call: str, works: Sequence[Work]) -> None:
        """Stop if a process came with another batch; take over what the first process's script has changed."""
        controls = pickle.dumps(self._backend.controls())
        batch = _fingerprint(works, self._backend.host) if any(work.shards for work in works) else 0
        everyone = self._meet(call, batch, _short_hash(controls), self._backend.touched())
        for index, (_, theirs, _, _) in enumerate(everyone):
            if theirs != everyone[0][1]:
                raise ExactError(
                    f"Every process computes on the same whole batch. In step {works[0].step} process {index} came "
                    "with other data, shards, threads or seed than process 0. Read the same batches in every process "
                    "(no DistributedSampler), and give threads= where hosts differ."
                )
        touched = any(each for _, _, _, each in everyone)
        if touched:
            self._take_state()
        if touched or any(theirs != everyone[0][2] for _, _, theirs, _ in everyone):  # after the state, as in a worker
            self._backend.turn(pickle.loads(self._wire.broadcast(controls)))

    def _meet(self, call: str, *numbers: int) -> list[list[int]]:
        """Return the numbers of all processes. Every call begins here, so that no two are taken for one another."""
        everyone = self._wire.gather([_short_hash(call.encode()), *numbers])
        for index, (theirs, *_) in enumerate(everyone):
            if theirs == TERMINATED:  # SIGTERM has broken off its reading: all save the step before this call
                raise StopRequested
            if theirs == ABANDONED:
                raise PeerFailed(
                    f"Every process takes part. Process {index} failed before {call}; its output says why."
                )
            if theirs != everyone[0][0]:
                raise ExactError(
                    f"Every process makes the same calls in the same order. This one is at {call!r}, and process "
                    f"{index if self.first else 0} at another. Callbacks run in the first process alone: call the "
                    "trainer's methods in the script, where every process does."
                )
        return everyone

    def _take_state(self) -> None:
        """Load the first process's state."""
        self._backend.load(self._wire.broadcast(self._backend.state() if self.first else None))
        self._backend.touched()


def _fingerprint(works: Sequence[Work], host: Callable[[Any], Any]) -> int:
    head = works[0]
    numbers = (head.num_examples, head.num_shards, head.threads, head.seed, head.step)
    pieces = tuple(batches.transform(work.pieces, host) for work in works)
    return batches.fingerprint((numbers, *pieces))


def _place_on_host(hosts: list[str], index: int) -> tuple[int, int]:
    """Return the number of this process among those of its host, and how many these are."""
    return hosts[:index].count(hosts[index]), hosts.count(hosts[index])


def _short_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
