"""What the processes have measured in one attempt to make a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from lockstep.core.fold import Fold
from lockstep.core.plan import Plan
from lockstep.core.tree import Span
from lockstep.core.types import PartialSum, Phases


class Timing(NamedTuple):
    """The time that a process has spent in one part of an attempt, or in one shard, on its own monotonic clock."""

    what: str | int  # the name of a part, or the number of a shard
    start: float
    end: float


@dataclass(frozen=True)
class Attempt:
    """One attempt to make a step. An attempt that was not committed is followed by another of the same step."""

    step: int
    plan: Plan
    timings: Mapping[int, list[Timing]]  # by replica
    is_committed: bool = True
    lost: Mapping[int, int | None] = field(default_factory=dict)
    """The replicas whose process has ended in this attempt or after it, each with the shard it was computing."""
    phases: Phases = Phases.ALL

    @property
    def is_step(self) -> bool:
        """Whether this attempt makes a step; a pass for `trainer.gradients` makes none."""
        return self.is_committed and self.phases is not Phases.GRADIENT


class Observer(Protocol):
    """Protocol for an object that gets every attempt of a run's processes, and every line printed for the user."""

    def add_attempt(self, attempt: Attempt) -> None:
        """Takes an attempt that was committed or aborted."""

    def add_notice(self, text: str) -> None:
        """Takes a line that was printed, for example that a worker was lost."""


class TimedFold(Fold):
    """A `Fold` that also records the time of each shard: from the request for its buffer until its leaf is pushed.

    A framework that computes all shards in one program does so before it requests a buffer. If the time until the
    first request is longer than all that follows, no shard gets a timing.
    """

    def set_clock(self, clock: Callable[[], float], timings: list[Timing]) -> None:
        """Adds a timing to `timings` for each shard from now on, measured with `clock`."""
        self._clock, self._timings = clock, timings
        self._opened = self._start = clock()

    def get_buffer(self, shard: int) -> PartialSum:
        """Returns the memory of the shard's leaf, and begins its timing."""
        self._start = self._clock()
        return super().get_buffer(shard)

    def push(self, shard: int, leaf: PartialSum) -> None:
        """Takes a shard's leaf, and ends its timing."""
        super().push(shard, leaf)
        self._timings.append(Timing(shard, self._start, self._clock()))

    def partial_sums(self) -> dict[Span, PartialSum]:
        """Returns the remaining partial sums; drops the shards' timings if all were computed before the first."""
        shards = [timing for timing in self._timings if isinstance(timing.what, int)]
        if shards and shards[0].start - self._opened > sum(timing.end - timing.start for timing in shards):
            self._timings[:] = [timing for timing in self._timings if timing not in shards]
        return super().partial_sums()
