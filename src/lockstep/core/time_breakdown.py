"""The time breakdown: how much of each replica's step is input, computation, exchange and update.

A process reads the clock four times a step, which is the only cost. On an accelerator these are the times of the host,
that is what it waited for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PARTS = ("input", "compute", "exchange", "update")
_NOTABLE = 0.1  # a share of the step that is worth a sentence


class Stopwatch:
    """Adds up seconds by part of the step.

    >>> clock = iter([0.0, 0.5, 3.0])
    >>> stopwatch = Stopwatch(lambda: next(clock))
    >>> stopwatch.start()
    >>> stopwatch.lap("input")
    >>> stopwatch.lap("compute")
    >>> stopwatch.take()
    {'input': 0.5, 'compute': 2.5, 'exchange': 0.0, 'update': 0.0}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """Starts measuring the next part."""
        self._last = self._clock()

    def lap(self, part: str) -> None:
        """Adds the time since the last call to `part`."""
        now = self._clock()
        self._seconds[part] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Returns the seconds so far, and starts again from 0."""
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken


@dataclass(frozen=True)
class Breakdown:
    """The time of all steps of a `fit`.

    >>> parts = [{"input": 6.2, "compute": 3.0, "exchange": 0.2, "update": 0.2}]
    >>> breakdown = Breakdown(("cpu:0",), parts, seconds=10.0, num_steps=100, num_examples=25_600)
    >>> breakdown.samples_per_second
    2560.0
    >>> breakdown.describe_limit()
    '62 % of the step waits for input: add .prefetch(2), or workers=2 if Python code computes the examples'
    """

    devices: Sequence[str]
    parts: Sequence[Mapping[str, float]]  # of each replica
    seconds: float
    num_steps: int
    num_examples: int
    has_callbacks: bool = False  # callbacks of the script, whose time is part of the rest

    @property
    def samples_per_second(self) -> float:
        """Examples per second, over all devices."""
        return self.num_examples / self.seconds if self.seconds else 0.0

    def share(self, replica: int, part: str) -> float:
        """Returns the part's share of the time; `rest` is the time of callbacks and bookkeeping."""
        if not self.seconds:
            return 0.0
        own = self.parts[replica]
        seconds = max(0.0, self.seconds - sum(own.values())) if part == "rest" else own[part]
        return seconds / self.seconds

    def describe_limit(self) -> str:
        """Returns a sentence that says what limits the run, and what to do about it."""
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
