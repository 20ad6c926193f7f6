"""Time steps one by one, in turns that the contenders take, and summarize them.

Every step is timed on its own, so mean, median and p95 are of steps, not of blocks of steps: a stall in one step of a
hundred shows. Nothing is discarded but the first steps of a turn, which find cold caches for everybody alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

WARM_SHARE = 0.1  # of a turn: its first steps, which are not counted
MAX_STEPS = 2000  # in a turn


@dataclass(frozen=True)
class Summary:
    """What is printed of a contender's steps, in milliseconds.

    >>> Summary.of([0.001] * 19 + [0.101])
    Summary(num_steps=20, mean=6.0, median=1.0, p95=1.0)
    """

    num_steps: int
    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Summary":
        """Summarize the seconds of each step."""
        milliseconds = [1000 * each for each in seconds]
        middle = statistics.median(milliseconds)
        return cls(len(milliseconds), statistics.fmean(milliseconds), middle, percentile(milliseconds, 95))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: the least value that at least `percent` % of the values do not exceed.

    >>> percentile([5, 1, 4, 2, 3], 95), percentile(range(1, 101), 95)
    (5, 95)
    """
    if not values:
        raise ValueError("A percentile needs at least one value.")
    rank = math.ceil(percent / 100 * len(values) - 1e-9)
    return sorted(values)[max(rank, 1) - 1]


def plan_turn(step_seconds: float, turn_seconds: float, least_warm: int = 0) -> tuple[int, int]:
    """Return how many steps of a turn are not counted and how many are.

    >>> plan_turn(0.01, 0.5), plan_turn(1.2, 0.5), plan_turn(1.2, 0.5, least_warm=1)
    ((5, 50), (0, 1), (1, 1))
    """
    num_steps = turn_seconds / max(step_seconds, 1e-6)
    warm = max(round(WARM_SHARE * num_steps), least_warm)
    return min(warm, MAX_STEPS // 10), min(max(round(num_steps), 1), MAX_STEPS)


def time_steps(
    step: Callable[[], object],
    finish: Callable[[], object],
    warm: int,
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds of `count` steps, after `warm` steps that are not counted.

    `finish` waits for what the steps have started and reads the sums of loss and accuracy. It is called before the
    first counted step, which so begins with nothing under way, and within the last one's time.
    """
    for _ in range(warm):
        step()
    finish()
    result = []
    before = clock()
    for index in range(count):
        step()
        if index == count - 1:
            finish()
        now = clock()
        result.append(now - before)
        before = now
    return result


class StepClock:
    """Times the steps of a `fit` from within a callback: a step lasts from the end of the one before to its own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before: float | None = None
        self.seconds: list[float] = []

    def mark(self) -> None:
        """Note that a step has ended; the first since the beginning or `restart` is not counted."""
        now = self._clock()
        if self._before is not None:
            self.seconds.append(now - self._before)
        self._before = now

    def restart(self) -> None:
        """Let what happens from the last step until the end of the next one count for nobody."""
        self._before = None

    def close(self) -> None:
        """Let the last step end only now, so that it bears what `fit` did until it returned."""
        assert self._before is not None
        self.seconds[-1] += self._clock() - self._before

    def take(self, count: int) -> list[float]:
        """Return the seconds of the last `count` steps, and begin anew."""
        result, self.seconds, self._before = self.seconds[-count:], [], None
        assert len(result) == count
        return result


class Contender(Protocol):
    """A row of the table: what takes a turn."""

    least_warm: int

    def take_turn(self, warm: int, count: int) -> list[float]:
        """Make `warm` steps, then `count` steps, and return the seconds of each of these."""


def interleave(
    contenders: Mapping[str, Contender], rounds: int, turn_seconds: float, pause: Callable[[], object] = lambda: None
) -> dict[str, list[list[float]]]:
    """Return each contender's seconds per step, round by round.

    In a round each contender makes steps for about `turn_seconds`, in turn, and the order is reversed from round to
    round, so that whatever the machine does meanwhile happens to all. How many steps that is follows from the mean of
    its steps so far. `pause` is called before each turn.
    """
    spent: dict[str, list[float]] = {}
    for name, contender in contenders.items():
        pause()
        spent[name] = contender.take_turn(contender.least_warm, 1)
        if spent[name][0] < WARM_SHARE * turn_seconds:
            spent[name] = contender.take_turn(1, 5)
    result: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in list(contenders)[:: -1 if index % 2 else 1]:
            pause()
            warm, count = plan_turn(statistics.fmean(spent[name]), turn_seconds, contenders[name].least_warm)
            result[name].append(contenders[name].take_turn(warm, count))
            spent[name] += result[name][-1]
    return result
