"""One process that holds every replica."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.backends.base import Backend, Work
from lockstep.core.plan import Plan
from lockstep.data.reader import Readers
from lockstep.exchange.in_process import InProcessExchange
from lockstep.processes.base import Value
from lockstep.processes.commands import Command
from lockstep.training.step import Member


class SingleProcess:
    """This process alone: there is no other process to wait for or to send to."""

    first = True
    closed = False

    def __init__(self, backend: Backend) -> None:
        self.devices = tuple(backend.devices)
        self._readers = Readers(backend.stage)
        self.member = Member(
            backend, lambda plan: InProcessExchange(backend), range(len(self.devices)), self._readers.read
        )

    def ready(self) -> None:
        """Nothing to wait for."""

    @contextmanager
    def step(self, works: list[Work], plan: Plan) -> Iterator[Work]:
        """Hand out the whole batch."""
        yield works[0]

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Return this process's own answer."""
        return [command(self.member, works[0])]

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Return both as they are: the callbacks run here."""
        return stop, terminated

    def share(self, make: Callable[[], Value]) -> Value:
        """Return what `make` gives: this process is the first."""
        return make()

    def settle(self) -> None:
        """Nothing to bring."""

    def abandon(self, terminated: bool = False) -> None:
        """Nobody to tell."""

    def replicas(self) -> list[list[int]]:
        """Return the numbers of all replicas, in one list."""
        return [list(range(len(self.devices)))]

    def close(self) -> None:
        """Let go of the memory for partial sums, and of what was opened to read."""
        self._readers.close()
        self.member.close()
