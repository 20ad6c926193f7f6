"""How many CPU replicas a run uses if the script does not say: when they are worth starting, and how many there can be.

A run starts with one replica, so that its first step waits for nothing. The number of replicas changes the time of a
step, but no result.
"""

from collections import deque
from statistics import median

SECONDS_ALONE = 2.0  # a short run, such as a test, starts no process
MIN_STEP = 0.002  # seconds; below, meeting twice a step costs as much as another core gives
_KEPT = 0.95  # replicas are kept if a step takes at most this part of the time that it took alone
_NUM_COMPARED = 50  # steps
_SECONDS_COMPARED = 0.5
_MEMORY = 0.8  # the part of the free memory that replicas may take


def count_replicas(num_shards: int, num_threads: int, num_cores: float, free_memory: int, process_memory: int) -> int:
    """Returns how many replicas of `num_threads` threads the host has room for; a replica computes at least one shard.

    `process_memory` is the memory of this process; each further process is assumed to need as much.

    >>> count_replicas(8, 1, num_cores=4, free_memory=16 << 30, process_memory=1 << 30)
    4
    >>> count_replicas(8, 1, num_cores=64, free_memory=3 << 30, process_memory=1 << 30)
    3
    """
    by_cores = int(num_cores / num_threads + 1e-6)
    by_memory = 1 + int(_MEMORY * free_memory / max(process_memory, 1))
    return max(1, min(by_cores, by_memory, num_shards))


class GrowthRule:
    """Decides when a run with one replica gets more replicas, and whether it keeps them.

    >>> rule = GrowthRule()
    >>> any([rule.add_step(0.01) for _ in range(200)])
    True
    >>> [rule.add_grown_step(0.012) for _ in range(110)][-1]
    False
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_steps = 0
        self._alone: deque[float] = deque(maxlen=_NUM_COMPARED)
        self._grown: list[float] = []

    def add_step(self, seconds: float) -> bool:
        """Records the seconds of a step with one replica; returns whether it is time to try more replicas."""
        self._num_steps += 1
        self._seconds += seconds
        self._alone.append(seconds)
        return self._seconds >= SECONDS_ALONE and self._seconds / self._num_steps >= MIN_STEP

    def add_grown_step(self, seconds: float) -> bool | None:
        """Records the seconds of a step of all replicas; returns whether to keep them, or None until that is known."""
        self._grown.append(seconds)
        compared = self._grown[_NUM_COMPARED // 2 :]  # the first steps of a new replica take longer
        if len(compared) < _NUM_COMPARED or sum(compared) < _SECONDS_COMPARED:
            return None
        return median(compared) < _KEPT * median(self._alone)

    def describe(self) -> str:
        """Returns a text with the time of a step with one replica and with all replicas."""
        alone, grown = 1000 * median(self._alone), 1000 * median(self._grown)
        return f"a step took {alone:.1f} ms alone and {grown:.1f} ms with more"
