"""The protocol of a team: how a process reaches the others that train with it."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar

from lockstep.backends.base import Work
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.core.step import Member

Value = TypeVar("Value")


class Team(Protocol):
    """This process and the others, as one."""

    devices: tuple[str, ...]  # of all processes, in order
    first: bool  # whether this process prints and writes for all
    closed: bool

    def ready(self) -> None:
        """Returns once every process is there; raises what kept one from coming."""

    def step(self, works: list[Work], plan: Plan) -> Sums:
        """One step by everyone; gives the sums of the whole batch."""

    def gather(self, method: str, works: list[Work]) -> list[dict[int, Any]]:
        """Runs `Member.<method>` on everyone and gives all their results by shard."""

    def agree(self, stop: bool, terminated: bool) -> tuple[bool, bool]:
        """Whether to stop, as the process that runs the callbacks has it; whether any process was told to end."""

    def share(self, make: Callable[[], Value]) -> Value:
        """What `make` gives in the first process, in every process; what it raises there is raised everywhere."""

    def settle(self) -> None:
        """Brings to every process what the first one's callbacks have done to the model."""

    def abandon(self, terminated: bool = False) -> None:
        """Tells the others that this process has failed, or was terminated, between two calls: it comes to no other."""

    def replicas(self) -> list[list[int]]:
        """The replicas that each process holds."""

    @property
    def member(self) -> Member:
        """This process's own part."""

    def close(self) -> None:
        """Ends what was started; idempotent."""


def numbered(groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """The replicas of each process, numbered through the processes.

    >>> numbered([["cuda:0", "cuda:1"], ["cuda:2"]])
    [[0, 1], [2]]
    """
    numbers = count()
    return [[next(numbers) for _ in group] for group in groups]
