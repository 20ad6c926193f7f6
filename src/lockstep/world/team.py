"""What a team is."""

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

from lockstep.backends.base import Work
from lockstep.core.metrics import Sums
from lockstep.core.plan import Plan
from lockstep.core.step import Member


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

    def agree(self, stop: bool) -> bool:
        """Whether to stop, as the process that runs the callbacks has it."""

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
