"""The times of all steps of a run in a bounded number of bins, whatever its length.

All bins cover the same number of steps. When there are too many bins, neighbouring bins are merged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.attempt import Timing

MAX_CELLS = 4096  # bins times replicas
MIN_BINS, MAX_BINS = 16, 512
STEPS = "steps"  # the number of steps, beside the seconds of a replica's parts


@dataclass
class Bin:
    """The times of some successive steps."""

    num_steps: int = 0
    parts: dict[int, dict[str, float]] = field(default_factory=dict)  # seconds of each part and steps, by replica
    pauses: dict[str, float] = field(default_factory=dict)  # seconds in which all replicas waited, by reason
    num_saves: int = 0
    ended: float = 0.0  # seconds from the beginning of the run to the end of the last step

    def merge(self, other: "Bin") -> None:
        """Adds the times of another bin."""
        self.num_steps += other.num_steps
        self.num_saves += other.num_saves
        self.ended = max(self.ended, other.ended)
        _add(self.pauses, other.pauses)
        for replica, parts in other.parts.items():
            _add(self.parts.setdefault(replica, {}), parts)

    def get_mean(self, replica: int, part: str) -> float | None:
        """Returns the mean seconds of a part of this replica's steps; None if the replica made no step in this bin."""
        parts = self.parts.get(replica)
        return parts.get(part, 0.0) / parts[STEPS] if parts else None


class StepBins:
    """The bins of a run, whose first step is given.

    >>> bins = StepBins(first_step=0, max_cells=8, min_bins=4)
    >>> for step in range(9):
    ...     bins.add_step(step, {replica: [Timing("compute", 0.0, 1.0 + replica)] for replica in (0, 1)}, step + 1.0)
    >>> bins.width, [each.num_steps for each in bins.bins]
    (4, [4, 4, 1])
    >>> bins.bins[0].get_mean(1, "compute")
    2.0
    """

    def __init__(self, first_step: int, max_cells: int = MAX_CELLS, min_bins: int = MIN_BINS) -> None:
        self.first_step = self.last_step = first_step
        self.width = 1
        self.bins: list[Bin] = []
        self.replicas: set[int] = set()
        self._max_cells, self._min_bins = max_cells, min_bins

    @property
    def num_steps(self) -> int:
        """The number of steps that the bins would cover if the last bin were full."""
        return self.width * len(self.bins)

    def add_step(self, step: int, timings: Mapping[int, list[Timing]], ended: float) -> None:
        """Adds what the replicas have measured in a step; they come in order, unless an earlier state is restored."""
        found = self._find(step)
        found.num_steps += 1
        self.last_step = max(self.last_step, step)
        found.ended = ended
        for replica, own in timings.items():
            seconds = {STEPS: 1.0}
            for timing in own:
                if isinstance(timing.what, str):
                    seconds[timing.what] = seconds.get(timing.what, 0.0) + timing.end - timing.start
            _add(found.parts.setdefault(replica, {}), seconds)
        self.replicas.update(timings)
        limit = min(MAX_BINS, max(self._min_bins, self._max_cells // max(len(self.replicas), 1)))
        while len(self.bins) > limit:
            self._halve()

    def add_pause(self, step: int, reason: str, seconds: float) -> None:
        """Adds a time in which all replicas waited, at this step."""
        _add(self._find(step).pauses, {reason: seconds})

    def add_save(self, step: int) -> None:
        """Counts a checkpoint at this step."""
        self._find(step).num_saves += 1

    def get_start(self, index: int) -> float:
        """Returns approximately the seconds from the beginning of the run to the beginning of a bin's first step."""
        return self.bins[index - 1].ended if index else 0.0

    def _find(self, step: int) -> Bin:
        index = max(step - self.first_step, 0) // self.width
        while len(self.bins) <= index:
            self.bins.append(Bin())
        return self.bins[index]

    def _halve(self) -> None:
        for left, right in zip(self.bins[::2], self.bins[1::2], strict=False):
            left.merge(right)
        self.bins = self.bins[::2]
        self.width *= 2


def _add(to: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        to[name] = to.get(name, 0.0) + value
