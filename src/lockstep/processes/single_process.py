"""One process that holds every replica."""

import time
from collections.abc import Callable
from typing import Any

from lockstep.backends.base import Backend, Work
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.core.step import Member
from lockstep.data.reader import Readers
from lockstep.exchange.in_process import InProcessExchange
from lockstep.launch.signals import defer_interrupts
from lockstep.processes.base import Value


class SingleProcess:
    """Nobody else."""

    first = True
    closed = False

    def __init__(self, backend: Backend) -> None:
        self.devices = tuple(backend.devices)
        self._readers = Readers(backend.stage)
        self.member = Member(
            backend, InProcessExchange(backend), defer_interrupts, time.perf_counter, self._readers.read
        )

    def ready(self) -> None:
        """Nobody to wait for."""

    def step(self, works: list[Work], plan: Plan) -> Sums:
        """One step over every shard."""
        return self.member.step(works[0])

    def gather(self, method: str, works: list[Work]) -> list[dict[int, Any]]:
        """This process's own result."""
        return [getattr(self.member, method)(works[0])]

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """The callbacks run here."""
        return stop, terminated

    def share(self, make: Callable[[], Value]) -> Value:
        """The first process is this one."""
        return make()

    def settle(self) -> None:
        """Nobody else."""

    def abandon(self, terminated: bool = False) -> None:
        """Nobody to tell."""

    def replicas(self) -> list[list[int]]:
        """All of them, here."""
        return [list(range(len(self.devices)))]

    def close(self) -> None:
        """Lets go of the nodes and of what was opened to read."""
        self._readers.close()
        self.member.exchange.close()
