"""The protocol of the processes that train one model together.

There are three kinds: one process that holds every replica, workers that this script started, or processes that a
launcher started. In each of them the same commands run over the process's own part of the batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from lockstep.backends.base import Work
from lockstep.core.plan import Plan
from lockstep.processes.commands import Command
from lockstep.training.step import Member

Value = TypeVar("Value")


class Processes(Protocol):
    """This process and the others that train with it."""

    devices: tuple[str, ...]  # of all processes, in order
    first: bool  # whether this process prints and writes for all
    closed: bool

    @property
    def member(self) -> Member:
        """This process itself."""

    def ready(self) -> None:
        """Return once every process is there; raise what kept one from coming."""

    def step(self, works: list[Work], plan: Plan) -> AbstractContextManager[Work]:
        """Have all others make a step; the body of the context makes this process's part of it, on the work it gets.

        What the body raises has consequences for the others, which this context sees to.
        """

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Run the command in each process on its work, and return all answers in the order of the processes."""

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Return whether to stop, as the process that runs the callbacks has it, and whether any got SIGTERM."""

    def share(self, make: Callable[[], Value]) -> Value:
        """Return in every process what `make` gives in the first one; what it raises there is raised everywhere."""

    def settle(self) -> None:
        """Bring to every process what the first one's callbacks have done to the model."""

    def abandon(self, terminated: bool = False) -> None:
        """Tell the others that this process has failed, or got SIGTERM, between two calls and makes no other."""

    def replicas(self) -> list[list[int]]:
        """Return the numbers of the replicas that each process holds."""

    def close(self) -> None:
        """End what was started; idempotent."""
