"""The processes that torchrun, SLURM, MPI or the script itself launched, of which this process is one.

Every process runs the whole script and reads whole batches, or, with a pipeline, only its own shards. The state and the
decisions of callbacks are copied from the first process. The processes exchange a fingerprint of each batch once they
have computed their shards, or, after a change, before they compute them; different fingerprints raise an error
(`StepMeeting`).
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from lockstep.backends.base import Backend
from lockstep.core import batches
from lockstep.core.attempt import Attempt, Observer, Timing
from lockstep.core.batches import Rows
from lockstep.core.plan import Plan
from lockstep.core.types import Phases, Work
from lockstep.data.reader import Readers
from lockstep.devices import is_cpu
from lockstep.errors import ExactError, LaunchError, PeerFailed, WorkerError
from lockstep.exchange.base import Exchange
from lockstep.exchange.host_memory import HostMemory
from lockstep.exchange.in_process import InProcessExchange
from lockstep.exchange.launched_exchange import LaunchedExchange
from lockstep.exchange.torch_distributed import ProcessGroup
from lockstep.launch.deferred_signals import StopRequested
from lockstep.launch.host import describe_host
from lockstep.processes.base import Value
from lockstep.processes.commands import Command, name_command
from lockstep.processes.step_meeting import StepMeeting
from lockstep.training.step import Member

# Sent in place of the hash of a call's name.
ABANDONED = -1
TERMINATED = -2
FAILED = -3  # in a step


class LaunchedProcesses:
    """This process and the others that were launched with it."""

    closed = False

    def __init__(self, backend: Backend, wire: ProcessGroup, device: str) -> None:
        self._backend = backend
        self._wire = wire
        self._observer: Observer | None = None
        self._calling = False  # whether a call is running or has failed, of which the others know
        self._call_now = "", 0  # its name, and its step
        self._touched = False  # whether this process's script has written to the state, unknown to the others
        self._host = describe_host()
        places: list[tuple[str, str]] = wire.gather_objects((device, self._host))
        self._readers = Readers(backend.stage, _place_on_host([host for _, host in places], wire.index))
        self._memory = HostMemory.open(wire, self._host, is_cpu(device))
        self._meeting = StepMeeting(wire, self._has_changed, [FAILED, 0, 0, 0])
        self.member = Member(backend, self._open_exchange, [wire.index], self._readers.read)
        self.devices = tuple(device for device, _ in places)
        self.first = wire.index == 0
        self.route = self._memory.groups.describe()
        self._take_state()

    def resize(self, devices: Sequence[str]) -> bool:
        """Raises, because the launcher owns the processes."""
        raise LaunchError(
            f"The number of devices was set by a launcher, which started {len(self.devices)} processes. Start the "
            "script with python alone to use resize, or launch another number."
        )

    def observe(self, observer: Observer | None) -> None:
        """Passes every step from now on to the observer; the processes then exchange their times after each step."""
        self._observer = observer

    def replicas(self) -> list[list[int]]:
        """Returns the number of the one replica of each process."""
        return [[index] for index in range(len(self.devices))]

    def ready(self) -> None:
        """Does nothing, because all processes were ready when this object was created."""

    def assign(self, num_shards: int) -> Plan:
        """Gives each process as many shards as the others, or one more."""
        return Plan.even(num_shards, range(len(self.devices)))

    @contextmanager
    def step(self, works: list[Work], plan: Plan) -> Iterator[Work]:
        """Yields this process's part of the batch, which is compared with the others' before the step counts."""
        observer, laps = self._observer, self.member.laps
        facts, controls = self._describe("step", works)
        with self._call():
            has_changed = self._meeting.comes_first and self._agree_on(facts, controls)
            if self._meeting.comes_first:
                facts = [*facts[:2], 0, 0]  # what has changed is in every process
            self._meeting.begin(facts, works[0].num_filled, has_changed)
            laps.collect_timings(observer is not None)
            yield self._own(works)
            if observer is not None:
                timings = self._gather_timings(laps.take_timings())
                observer.add_attempt(Attempt(works[0].step, plan, timings, phases=works[0].phases))

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Returns the results of all processes, in every process; a failed process takes part in the exchange, too."""
        call = name_command(command)
        facts = self._describe(call, works)
        with self._call():
            self._agree_on(*facts)
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
                        f"Process {index} failed in {call}, and every process is needed. The output of that "
                        "process has its error."
                    )
            return answers

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Returns whether the first process wants to stop, and whether any process got SIGTERM."""
        with self._call():
            everyone = self._meet("agree", int(stop), int(terminated), 0)
        return bool(everyone[0][1]), any(terminated for _, _, terminated, _ in everyone)

    def share(self, make: Callable[[], Value]) -> Value:
        """Returns what `make` returns in the first process, for which the others wait."""
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
        """Copies the state and controls of the first process into this one, if the first has changed them."""
        facts = self._describe("settle", [])
        with self._call():
            self._agree_on(*facts)

    def end_quiet_period(self) -> None:
        """Does nothing: every process looks for changes before every command."""

    def abandon(self, terminated: bool = False) -> None:
        """Reports to the others that this process failed or got SIGTERM, instead of its next call, unless they know."""
        if not self._calling:
            with suppress(WorkerError):
                self._wire.gather([TERMINATED if terminated else ABANDONED, 0, 0, 0])

    def close(self) -> None:
        """Frees memory and closes the readers. The process group stays open, because another trainer may use it."""
        self._readers.close()
        self.member.close()
        self._memory.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._calling = True
        yield
        self._calling = False

    def _gather_timings(self, timings: list[Timing]) -> dict[int, list[Timing]]:
        """Returns the timings of every process, by rank, on this host's clock.

        Each host has a clock of its own. The times are aligned at the end of a step's exchange, which all processes
        leave at about the same time.
        """
        everyone: list[tuple[str, list[Timing]]] = self._wire.gather_objects((self._host, timings))
        ends = [next(timing.end for timing in each if timing.what == "exchange") for _, each in everyone]
        own = self._wire.index
        shifts = [
            ends[own] - end if host != everyone[own][0] else 0.0 for (host, _), end in zip(everyone, ends, strict=True)
        ]
        return {
            rank: [Timing(timing.what, timing.start + shift, timing.end + shift) for timing in each]
            for rank, ((_, each), shift) in enumerate(zip(everyone, shifts, strict=True))
        }

    def _own(self, works: Sequence[Work]) -> Work:
        """Returns this process's part of the batch, with a function that reads shard 0 of the whole batch."""
        piece = works[0].shards.get(0)
        own = replace(works[self._wire.index], quiet_period=None)
        return replace(own, first=lambda: self._readers.read([piece])[0] if isinstance(piece, Rows) else piece)

    def _open_exchange(self, plan: Plan) -> Exchange:
        if self._wire.count == 1:  # the same additions as without a launcher
            return InProcessExchange(self._backend)
        return LaunchedExchange(self._backend, self._wire, self._memory, plan, self._meeting)

    def _describe(self, call: str, works: Sequence[Work]) -> tuple[list[int], bytes]:
        """Returns [checksums of call, batch and controls, whether the state was written to], and pickled controls."""
        controls = pickle.dumps(self._backend.controls())
        batch = _fingerprint(works, self._backend.host) if any(work.shards for work in works) else 0
        self._touched |= self._backend.touched()
        self._call_now = call, works[0].step if works else 0
        return [_short_hash(call.encode()), batch, _short_hash(controls), self._touched], controls

    def _agree_on(self, facts: Sequence[int], controls: bytes) -> bool:
        """Copies what the script of the first process has changed; returns whether anything was changed.

        Raises an error if a process has a different batch.
        """
        everyone = self._wire.gather(facts)
        if not self._has_changed(everyone):
            return False
        if any(touched for _, _, _, touched in everyone):
            self._take_state()
        self._backend.turn(pickle.loads(self._wire.broadcast(controls)))  # after the state, as in a worker
        return True

    def _has_changed(self, everyone: list[list[int]]) -> bool:
        """Returns whether a process's script has changed the state or the controls; raises if their calls differ."""
        call, step = self._call_now
        self._check_calls(call, everyone)
        for index, (_, theirs, _, _) in enumerate(everyone):
            if theirs != everyone[0][1]:
                raise ExactError(
                    f"Every process must train on the same whole batch. In step {step} process {index} has "
                    "other data, shards, threads or seed than process 0. Read the same batches in every process (no "
                    "DistributedSampler), and give threads= if hosts differ."
                )
        return any(touched or theirs != everyone[0][2] for _, _, theirs, touched in everyone)

    def _meet(self, call: str, *numbers: int) -> list[list[int]]:
        """Returns what every process sends for this call; raises if one has failed or makes another call."""
        everyone = self._wire.gather([_short_hash(call.encode()), *numbers])
        self._check_calls(call, everyone)
        return everyone

    def _check_calls(self, call: str, everyone: list[list[int]]) -> None:
        """Raises if a process has failed or makes another call."""
        own = _short_hash(call.encode())
        for index, (theirs, *_) in enumerate(everyone):
            if theirs == TERMINATED:  # SIGTERM has broken off its reading: all save the step before this call
                raise StopRequested
            if theirs == FAILED:
                raise PeerFailed(f"Process {index} failed in this step, so no process commits it. See its own output.")
            if theirs == ABANDONED:
                raise PeerFailed(
                    f"Process {index} failed before {call}, and every process is needed. The output of that "
                    "process has its error."
                )
            if theirs != own:
                raise ExactError(
                    f"Every process must make the same calls in the same order. This one is at {call!r}, and process "
                    f"{index} at another. Callbacks run in the first process alone: call the "
                    "trainer's methods in the script, which every process runs."
                )

    def _take_state(self) -> None:
        """Loads the state of the first process into this one."""
        self._backend.load(self._wire.broadcast(self._backend.state() if self.first else None))
        self._backend.touched()
        self._touched = False


def _fingerprint(works: Sequence[Work], host: Callable[[Any], Any]) -> int:
    head = works[0]
    numbers = (head.num_examples, head.num_shards, head.threads, head.seed, head.step, head.phases.value)
    # Of gradients that are given, those of the first process count.
    given = head.phases is Phases.UPDATE
    pieces = () if given else tuple(batches.transform(work.pieces, host) for work in works)
    return batches.fingerprint((numbers, *pieces))


def _place_on_host(hosts: list[str], index: int) -> tuple[int, int]:
    """Returns this process's number among the processes of its host, and how many these are."""
    return hosts[:index].count(hosts[index]), hosts.count(hosts[index])


def _short_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
