"""How long a process may keep the others waiting before the user is notified, and before the process is ended."""

from collections import deque
from dataclasses import dataclass, field

SECONDS_TO_NOTICE = 5.0
MIN_DEADLINE = 60.0
_TIMES = 30  # the longest of the last steps, times this
_FIRST_STEPS = 3  # may compile, import and read files for the first time


@dataclass
class Deadline:
    """The deadline of every wait, which follows from the times of the run's own steps.

    `seconds` is a deadline that the user has set instead; 0 means that no process is ended. If it is None, the first
    steps have no deadline, because they may compile code, and later ones none that is shorter than `shortest`.

    >>> deadline = Deadline()
    >>> deadline.get_seconds()
    inf
    >>> for _ in range(3):
    ...     deadline.add_step(4.0)
    >>> deadline.get_seconds()
    120.0
    """

    seconds: float | None = None
    notice: float = SECONDS_TO_NOTICE  # after which a wait is reported
    shortest: float = MIN_DEADLINE  # of the deadlines that follow from steps
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _derived: float = float("inf")  # from the steps; each step asks for it several times

    @classmethod
    def for_compiling(cls, seconds: float | None) -> "Deadline":
        """Returns the deadline of a run in which any step may bring a shape that one process must compile first."""
        return cls(seconds, notice=60.0, shortest=1800.0)

    def add_step(self, seconds: float) -> None:
        """Records the seconds of a step."""
        self._steps.append(seconds)
        if len(self._steps) >= _FIRST_STEPS:
            self._derived = max(self.shortest, _TIMES * max(self._steps))

    def get_seconds(self) -> float:
        """Returns how many seconds a process may keep the others waiting."""
        return self._derived if self.seconds is None else self.seconds or float("inf")


@dataclass
class Wait:
    """One wait for another process: when the user is notified of the wait, and when its deadline has passed."""

    began: float
    deadline: float
    notice: float = SECONDS_TO_NOTICE
    is_noticed: bool = False

    def get_timeout(self, now: float) -> float | None:
        """Returns the seconds until the notice or the deadline is due; None if neither ever is."""
        due = min(self.deadline, float("inf") if self.is_noticed else self.notice)
        return None if due == float("inf") else max(0.0, self.began + due - now)

    def is_notice_due(self, now: float) -> bool:
        """Returns True once, when the wait is long enough to notify the user."""
        due = not self.is_noticed and now - self.began >= self.notice
        self.is_noticed |= due
        return due

    def is_over(self, now: float) -> bool:
        """Returns whether the deadline has passed."""
        return now - self.began >= self.deadline
