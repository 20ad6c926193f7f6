"""The protocol of the processes that train one model together.

There are three kinds: one process that holds every replica, workers that this script started, or processes that a
launcher started. Each process runs the same commands on its own part of the batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from lockstep.core.attempt import Observer
from lockstep.core.plan import Plan
from lockstep.core.types import Work
from lockstep.processes.commands import Command
from lockstep.training.step import Member

Value = TypeVar("Value")


class Processes(Protocol):
    """This process and the others that train one model with it."""

    first: bool  # whether this process prints and writes for all
    route: str  # how the partial sums of launched processes reach each other; empty for others

    @property
    def closed(self) -> bool:
        """Whether these processes can no longer be used, so that others must be started."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all processes, in order."""

    @property
    def member(self) -> Member:
        """The object that makes this process's part of each step."""

    def ready(self) -> None:
        """Waits until every process is ready; raises the error of a process that has failed."""

    def assign(self, num_shards: int) -> Plan:
        """Returns which replica computes which shard of the next batch."""

    def step(self, works: list[Work], plan: Plan) -> AbstractContextManager[Work]:
        """Returns a context that makes a step in all other processes, and yields the work of this process.

        If the block raises, the context ends the step in the other processes too. It raises `AttemptAborted` if a
        process was lost, so that the others must make the step again.
        """

    def gather(self, command: Command, works: Sequence[Work]) -> list[Any]:
        """Runs the command in each process on its work; returns all results in the order of the processes.

        Raises `AttemptAborted` if a process was lost, so that the others must run the command again.
        """

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Returns whether the process that runs the callbacks wants to stop, and whether any process got SIGTERM."""

    def share(self, make: Callable[[], Value]) -> Value:
        """Returns in every process what `make` returns in the first; raises an error of `make` in every process."""

    def settle(self) -> None:
        """Copies what the first process's callbacks have changed in the model to every process."""

    def end_quiet_period(self) -> None:
        """Records that the script's code runs next; its writes to the state are detected before the next command.

        It exchanges no messages, because it is not called in every process at the same time.
        """

    def abandon(self, terminated: bool = False) -> None:
        """Reports to the other processes that this one has failed, or got SIGTERM, and will make no further call."""

    def resize(self, devices: Sequence[str]) -> bool:
        """Trains on these devices from the next batch on; returns False if that needs other processes."""

    def observe(self, observer: Observer | None) -> None:
        """Passes each attempt to make a step from now on, with its times, to the observer; None stops this."""

    def replicas(self) -> list[list[int]]:
        """Returns the numbers of the replicas of each process."""

    def close(self) -> None:
        """Ends the processes that were started and frees memory; idempotent."""
