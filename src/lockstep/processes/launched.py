"""Processes that torchrun, SLURM, MPI or the script itself launched; this one is one of them.

Every process runs the whole script and reads whole batches, or of a pipeline its own
shards. The state, and what callbacks decide, are taken from the first; a fingerprint
of each batch travels ahead of the step, and a mismatch stops the run.
"""

import hashlib
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from lockstep.backends.base import Backend, Work
from lockstep.core import batches
from lockstep.core.batches import Rows
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.core.step import Member
from lockstep.data.reader import Readers
from lockstep.errors import ExactError, PeerFailed, WorkerError
from lockstep.exchange.in_process import InProcessExchange
from lockstep.exchange.torch_distributed import DistributedExchange, ProcessGroup
from lockstep.launch.signals import StopRequested, defer_interrupts
from lockstep.processes.base import Value

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
        self._plan: Plan | None = None
        places: list[tuple[str, str]] = wire.gather_objects((device, platform.node()))
        self._readers = Readers(backend.stage, _place([host for _, host in places], wire.index))
        self.member = Member(
            backend, InProcessExchange(backend), defer_interrupts, time.perf_counter, self._readers.read
        )
        self.devices = tuple(device for device, _ in places)
        self.first = wire.index == 0
        self._take_state()

    def replicas(self) -> list[list[int]]:
        """One in each process."""
        return [[index] for index in range(len(self.devices))]

    def ready(self) -> None:
        """They met when this object was made."""

    def step(self, works: list[Work], plan: Plan) -> Sums:
        """One step by everyone, over the same batch."""
        with self._call():
            self._agree_on("step", works)
            if plan != self._plan:
                self.member.exchange = DistributedExchange(self._backend, self._wire, plan)
                self._plan = plan
            return self.member.step(self._own(works))

    def gather(self, method: str, works: list[Work]) -> list[dict[int, Any]]:
        """Everyone's results, in every process; one that fails still meets the others."""
        with self._call():
            self._agree_on(method, works)
            result: dict[int, Any] | None = None
            failed: Exception | None = None
            try:
                result = getattr(self.member, method)(self._own(works))
            except Exception as error:
                failed = error
            everyone: list[dict[int, Any] | None] = self._wire.gather_objects(result)
            if failed is not None:
                raise failed
            for index, each in enumerate(everyone):
                if each is None:
                    raise PeerFailed(
                        f"Every process takes part. Process {index} failed in {method}; its output says why."
                    )
            return [each for each in everyone if each is not None]

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Stopping is the first process's to decide; a launcher's signal may reach only some."""
        with self._call():
            everyone = self._meet("agree", int(stop), int(terminated), 0)
        return bool(everyone[0][1]), any(told for _, _, told, _ in everyone)

    def share(self, make: Callable[[], Value]) -> Value:
        """What the first process makes; the others wait for it."""
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
        """The first process's state and controls, where it has changed them."""
        with self._call():
            self._agree_on("settle", [])

    def abandon(self, terminated: bool = False) -> None:
        """Comes to the others' next call with nothing but that word; where a call itself failed, they know."""
        if not self._calling:
            with suppress(WorkerError):
                self._wire.gather([TERMINATED if terminated else ABANDONED, 0, 0, 0])

    def close(self) -> None:
        """Lets go of the nodes and readers; the world outlives this trainer, for there may be another."""
        self._readers.close()
        self.member.exchange.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._calling = True
        yield
        self._calling = False

    def _own(self, works: list[Work]) -> Work:
        """This process's part; the first shard is in reach of all, for every process has the batch, or its rows."""
        piece = works[0].shards.get(0)
        return replace(
            works[self._wire.index], first=lambda: self._readers.read([piece])[0] if isinstance(piece, Rows) else piece
        )

    def _agree_on(self, method: str, works: list[Work]) -> None:
        """Stops where a process came with another batch; brings in what the first process's script has changed."""
        controls = pickle.dumps(self._backend.controls())
        batch = 0 if method in ("digests", "times", "settle") else _fingerprint(works, self._backend.host)
        everyone = self._meet(method, batch, _short(controls), self._backend.touched())
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
        if touched or any(turned != everyone[0][2] for _, _, turned, _ in everyone):  # after the state, as in a worker
            self._backend.turn(pickle.loads(self._wire.broadcast(controls)))

    def _meet(self, method: str, *numbers: int) -> list[list[int]]:
        """Everybody's numbers. Every call of the team begins here, so that no two can be taken for one another."""
        everyone = self._wire.gather([_short(method.encode()), *numbers])
        for index, (theirs, *_) in enumerate(everyone):
            if theirs == TERMINATED:  # SIGTERM has broken off its reading: everybody saves the step before this call
                raise StopRequested
            if theirs == ABANDONED:
                raise PeerFailed(
                    f"Every process takes part. Process {index} failed before {method}; its output says why."
                )
            if theirs != everyone[0][0]:
                raise ExactError(
                    f"Every process makes the same calls in the same order. This one is at {method!r}, and process "
                    f"{index if self.first else 0} at another. Callbacks run in the first process alone: call the "
                    "trainer's methods in the script, where every process does."
                )
        return everyone

    def _take_state(self) -> None:
        """Brings the first process's state to all."""
        self._backend.load(self._wire.broadcast(self._backend.state() if self.first else None))
        self._backend.touched()


def _fingerprint(works: list[Work], host: Callable[[Any], Any]) -> int:
    head = works[0]
    numbers = (head.num_examples, head.num_shards, head.threads, head.seed, head.step)
    pieces = tuple(batches.transform(work.pieces, host) for work in works)
    return batches.fingerprint((numbers, *pieces))


def _place(hosts: list[str], index: int) -> tuple[int, int]:
    """The number of this process among those of its host, and how many these are."""
    return hosts[:index].count(hosts[index]), hosts.count(hosts[index])


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
