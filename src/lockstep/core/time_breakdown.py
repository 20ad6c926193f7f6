"""Measures how much of each replica's time is spent on input, computation, exchange and update.

The only cost is that a process reads the clock four times in each step. On an accelerator these are the host's times:
how long the host waited in each part, not how long the device computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.attempt import Timing

PARTS = ("input", "compute", "exchange", "update")
_NOTABLE = 0.1  # a part with a smaller share of the step is not reported as the limit


class Stopwatch:
    """Measures the seconds that a process spends in each part of its steps.

    >>> clock = iter([0.0, 0.5, 3.0])
    >>> stopwatch = Stopwatch(lambda: next(clock))
    >>> stopwatch.start()
    >>> stopwatch.lap("input"), stopwatch.lap("compute")
    (0.5, 2.5)
    >>> stopwatch.take()
    {'input': 0.5, 'compute': 2.5, 'exchange': 0.0, 'update': 0.0}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.timings: list[Timing] | None = None  # a list collects when each part began and ended
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """Starts the measurement of a part; the next `lap` ends it."""
        self._last = self.clock()

    def lap(self, part: str) -> float:
        """Adds the time since the last call to `part`, and returns it."""
        now = self.clock()
        seconds = now - self._last
        self._seconds[part] += seconds
        if self.timings is not None:
            self.timings.append(Timing(part, self._last, now))
        self._last = now
        return seconds

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part so far, and resets them to 0."""
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def collect_timings(self, collects: bool) -> None:
        """Begins an attempt; its timings are collected if `collects`."""
        self.timings = [] if collects else None

    def take_timings(self) -> list[Timing]:
        """Returns the timings that were collected, and collects no more."""
        taken, self.timings = self.timings or [], None
        return taken


@dataclass(frozen=True)
class Breakdown:
    """The seconds that each replica spent in each part of the steps of a `fit`.

    >>> parts = [{"input": 6.2, "compute": 3.0, "exchange": 0.2, "update": 0.2}]
    >>> breakdown = Breakdown(("cpu:0",), parts, seconds=10.0, num_steps=100, num_examples=25_600)
    >>> breakdown.samples_per_second
    2560.0
    >>> breakdown.describe_limit()
    '62 % of the step waits for input: add .prefetch(2), or workers=2 if Python code computes the examples'
    """

    devices: Sequence[str]
    parts: Sequence[Mapping[str, float]]  # the seconds of each part, for each replica
    seconds: float
    num_steps: int
    num_examples: int
    has_callbacks: bool = False  # whether the script has callbacks, whose time is in none of the parts

    @property
    def samples_per_second(self) -> float:
        """The number of examples per second, over all devices."""
        return self.num_examples / self.seconds if self.seconds else 0.0

    def share(self, replica: int, part: str) -> float:
        """Returns the fraction of the time that a replica spent in `part`; `rest` is the time that is in no part."""
        if not self.seconds:
            return 0.0
        own = self.parts[replica]
        seconds = max(0.0, self.seconds - sum(own.values())) if part == "rest" else own[part]
        return seconds / self.seconds

    def describe_limit(self) -> str:
        """Returns a sentence that says what limits the speed of the run, and what to do about it."""
        replicas = range(len(self.parts))
        exchange = [self.share(replica, "exchange") for replica in replicas]
        slowest = min(replicas, key=lambda replica: exchange[replica])
        waiting = max(exchange) - exchange[slowest]
        limits = {
            max(self.share(replica, "input") for replica in replicas): (
                "waits for input: add .prefetch(2), or workers=2 if Python code computes the examples"
            ),
            waiting: f"is spent waiting for {self.devices[slowest]}, the slowest: look what else runs there",
            min(exchange): "brings the gradients together: a larger batch, or fewer devices, would spend less on it",
            max(self.share(replica, "update") for replica in replicas): (
                "is the optimizer's: a larger batch takes fewer steps"
            ),
            self.share(0, "rest"): (
                "is neither input nor training: look at the callbacks"
                if self.has_callbacks
                else "is the loop's own work between the steps: a larger batch takes fewer steps"
            ),
        }
        share, computing = max(limits), self.share(slowest, "compute")
        if share >= _NOTABLE:
            most = f"{_percent(computing)} of the step computes; " if computing > share else ""
            return f"{most}{_percent(share)} of the step {limits[share]}"
        return f"{_percent(computing)} of the step computes: the devices are busy, and more of them would help"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
