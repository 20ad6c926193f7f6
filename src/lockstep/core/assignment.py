"""Assigns shards to the processes of one host: the fastest split, and which process must avoid which shard.

The assignment changes the time of a step and nothing else.
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set
from statistics import median

from lockstep.core.plan import Plan, sizes
from lockstep.errors import WorkerError


def move_shards(plan: Plan, avoid: Mapping[int, Set[int]]) -> Plan:
    """Returns the plan with each shard that its process must avoid moved to the allowed process with the fewest shards.

    A shard that raised in one process is tried in another, and one that a process died of is not tried in the
    controller while there is a worker to try it. A shard that all processes must avoid stays where it is. Processes are
    given by their seats: 0 is the controller, the others are the workers.

    >>> move_shards(Plan.from_counts({0: 3, 1: 2}), {0: {2}}).owners
    (0, 0, 1, 1, 1)
    """
    if not any(avoid.values()):
        return plan
    owners = list(plan.owners)
    for shard, owner in enumerate(plan.owners):
        others = [seat for seat in plan.replicas if shard not in avoid.get(seat, ())]
        if shard in avoid.get(owner, ()) and others:
            owners[shard] = min(others, key=owners.count)
    return Plan(tuple(owners), plan.replicas)


class Suspects:
    """The shards of processes that died in evaluate or predict, where it is unknown which shard each was computing.

    >>> suspects = Suspects()
    >>> suspects.add({2, 3})
    >>> suspects.add({3, 4})
    Traceback (most recent call last):
    lockstep.errors.WorkerError: Two processes have ended outside a step, and both had shards 3 of one batch...
    """

    def __init__(self) -> None:
        self.shards: frozenset[int] = frozenset()

    def add(self, shards: Set[int]) -> None:
        """Records the shards of a dead process; raises WorkerError if an earlier dead process had one of them too."""
        both, self.shards = self.shards & shards, self.shards | shards
        if both:
            self.clear()
            raise WorkerError(
                f"Two processes have ended outside a step, and both had shards {', '.join(map(str, sorted(both)))} of "
                "one batch, so the examples of these shards, or the code that computes them, end processes. The shards "
                "were not tried in this process. Look at their examples and at the memory that these need."
            )

    def clear(self) -> None:
        """Removes all shards, because the batch was computed."""
        self.shards = frozenset()


_WINDOW = 9  # steps, whose median is a seat's time: one step that something else has disturbed changes nothing
_GAIN = 0.85  # another assignment must promise at most this part of the present one's time
_KEPT = 0.97  # and is kept if steps take at most this part of the time that they took before
_LOOK = 10  # steps between two looks
_LONGEST_WAIT = 10_000


class Balance:
    """Chooses how many shards each process (by seat) computes, from the times that the processes took for their shards.

    Replicas of one host slow each other down, so a change may gain less than expected. So each change is measured, and
    reverted if the steps have not become faster. The next change is then tried later, unless its expected gain is
    clearly larger than that of the reverted change.

    >>> balance = Balance()
    >>> for _ in range(11):
    ...     counts = balance.choose([0, 1], 8)
    ...     balance.note({0: counts[0] * 1.0, 1: counts[1] * 3.0}, step_seconds=counts[1] * 3.0)
    >>> balance.choose([0, 1], 8)
    {0: 6, 1: 2}
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._begin(())

    def _begin(self, seats: Sequence[int]) -> None:
        self._times: dict[int, deque[float]] = {seat: deque(maxlen=_WINDOW) for seat in seats}  # of one shard
        self._steps: deque[float] = deque(maxlen=_WINDOW // 2 + 1)  # as many as decide the median of a seat
        self._num_steps = 0  # since the last look
        self._num_since = 0  # since a change was taken back
        self._wait = 0  # steps, from there to the next change
        self._refused = 1.0  # the part of the time that it had promised
        self._before: tuple[dict[int, int], float, float] | None = None  # a change: counts, time and promise

    def note(self, seconds: Mapping[int, float], step_seconds: float) -> None:
        """Records the seconds that each process (by seat) took for its shards, and the seconds of the whole step."""
        self._steps.append(step_seconds)
        self._num_steps += 1
        self._num_since += 1
        for seat, total in seconds.items():
            if self._counts.get(seat):
                self._times[seat].append(total / self._counts[seat])

    def choose(self, seats: Sequence[int], num_shards: int) -> dict[int, int]:
        """Returns the number of shards of each process, by seat; the numbers only change if that is clearly faster."""
        if list(self._counts) != list(seats) or sum(self._counts.values()) != num_shards:
            self._counts = dict(zip(seats, sizes(num_shards, len(seats)), strict=True))
            self._begin(seats)
        elif self._num_steps >= _LOOK and len(seats) > 1 and all(self._times.values()):
            self._look({seat: median(times) for seat, times in self._times.items()}, num_shards)
            self._num_steps = 0
        return dict(self._counts)

    def _look(self, times: Mapping[int, float], num_shards: int) -> None:
        """Reverts the last change if it gained nothing; else makes the next one if that is expected to gain enough."""
        step_seconds = median(self._steps)
        if self._before is not None:
            counts, seconds, promise = self._before
            self._before = None
            if step_seconds > _KEPT * seconds:
                self._counts, self._refused, self._num_since = counts, promise, 0
                self._wait = min(3 * max(self._wait, _LOOK), _LONGEST_WAIT)
                return
        best = _find_fastest(times, num_shards)
        promise = _predict(best, times) / _predict(self._counts, times)
        is_due = self._num_since >= self._wait or promise < _GAIN * self._refused
        if promise < _GAIN and is_due:
            self._before, self._counts = (self._counts, step_seconds, promise), best


def _find_fastest(times: Mapping[int, float], num_shards: int) -> dict[int, int]:
    """Returns the number of shards by seat: one each, and each further shard for the process that finishes it first."""
    counts = dict.fromkeys(times, 1)
    for _ in range(num_shards - len(counts)):
        counts[min(counts, key=lambda seat: (counts[seat] + 1) * times[seat])] += 1
    return counts


def _predict(counts: Mapping[int, int], times: Mapping[int, float]) -> float:
    return max(count * times[seat] for seat, count in counts.items())
