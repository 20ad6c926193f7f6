"""One process that has every replica, so that no other process is needed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lockstep.backends.base import Backend
from lockstep.core.attempt import Attempt, Observer
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.data.reader import Readers
from lockstep.exchange.in_process import InProcessExchange
from lockstep.processes.base import Value
from lockstep.processes.commands import Command
from lockstep.training.step import Member


class SingleProcess:
    """This process alone, with all replicas."""

    first = True
    route = ""
    closed = False

    def __init__(self, backend: Backend) -> None:
        self.devices = tuple(backend.devices)
        self._observer: Observer | None = None
        self._readers = Readers(backend.stage)
        self.member = Member(
            backend, lambda plan: InProcessExchange(backend), range(len(self.devices)), self._readers.read
        )

    def ready(self) -> None:
        """Does nothing, because there is no other process."""

    def assign(self, num_shards: int) -> Plan:
        """Gives each device as many shards as the others, or one more."""
        return Plan.even(num_shards, range(len(self.devices)))

    def step(self, works: list[Work], plan: Plan) -> AbstractContextManager[Work]:
        """Returns a context with the whole batch, as this process's part."""
        return nullcontext(works[0]) if self._observer is None else self._observe(self._observer, works[0], plan)

    @contextmanager
    def _observe(self, observer: Observer, work: Work, plan: Plan) -> Iterator[Work]:
        self.member.laps.collect_timings(True)
        yield work
        timings = self.member.laps.take_timings()
        # The process's time is that of each of its replicas; a shard belongs to the one that computes it.
        each = {
            replica: [
                timing for timing in timings if isinstance(timing.what, str) or plan.owners[timing.what] == replica
            ]
            for replica in plan.replicas
        }
        observer.add_attempt(Attempt(work.step, plan, each, phases=work.phases))

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Returns the result of this process, in a list."""
        return [command(self.member, works[0])]

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Returns both values unchanged, because the callbacks run in this process."""
        return stop, terminated

    def share(self, make: Callable[[], Value]) -> Value:
        """Returns what `make` returns, because this process is the first."""
        return make()

    def settle(self) -> None:
        """Does nothing, because there is no other process."""

    def end_quiet_period(self) -> None:
        """Does nothing, because there is no other process."""

    def abandon(self, terminated: bool = False) -> None:
        """Does nothing, because there is no other process."""

    def resize(self, devices: Sequence[str]) -> bool:
        """Returns False: the session starts other processes, or puts this one's replicas on the devices."""
        return False

    def observe(self, observer: Observer | None) -> None:
        """Passes each step from now on, with its times, to the observer; None stops this."""
        self._observer = observer

    def replicas(self) -> list[list[int]]:
        """Returns the numbers of all replicas, in one list."""
        return [list(range(len(self.devices)))]

    def close(self) -> None:
        """Frees the memory for partial sums, and closes the readers."""
        self._readers.close()
        self.member.close()
