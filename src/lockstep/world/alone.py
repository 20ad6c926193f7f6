"""Alone: one process holds every replica."""

from typing import Any

from lockstep.backends.base import Backend, Work
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.core.step import Member
from lockstep.exchange.memory import MemoryExchange
from lockstep.launch.interrupt import deferred


class Alone:
    """Nobody else."""

    first = True
    closed = False

    def __init__(self, backend: Backend) -> None:
        self.devices = tuple(backend.devices)
        self.member = Member(backend, MemoryExchange(backend), deferred)

    def ready(self) -> None:
        """Nobody to wait for."""

    def step(self, works: list[Work], plan: Plan) -> Sums:
        """One step over every shard."""
        return self.member.step(works[0])

    def gather(self, method: str, works: list[Work]) -> list[dict[int, Any]]:
        """This process's own result."""
        return [getattr(self.member, method)(works[0])]

    def agree(self, stop: bool) -> bool:
        """The callbacks run here."""
        return stop

    def replicas(self) -> list[list[int]]:
        """All of them, here."""
        return [list(range(len(self.devices)))]

    def close(self) -> None:
        """Lets go of the nodes."""
        self.member.exchange.close()
