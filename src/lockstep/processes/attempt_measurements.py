"""Combines the times that the controller and its workers have measured in an attempt, for a run's observer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lockstep.core.attempt import Attempt, Observer, Timing
from lockstep.core.membership import CONTROLLER
from lockstep.core.plan import Plan
from lockstep.core.time_breakdown import Stopwatch
from lockstep.core.types import Work
from lockstep.processes.seats import Loss


class AttemptMeasurements:
    """The attempt that the processes make, or have made last. Without an observer nothing is measured.

    `report` prints a line for the user.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.observer: Observer | None = None
        self._report = report
        self._current: Attempt | None = None  # that was not given to the observer yet, without its timings
        self._laps: Stopwatch | None = None  # of this process
        self._own: list[Timing] = []

    @property
    def is_observed(self) -> bool:
        """Whether there is an observer."""
        return self.observer is not None

    def announce(self, text: str) -> None:
        """Prints a line for the user, and passes the line to the observer."""
        self._report(text)
        if self.observer is not None:
            self.observer.add_notice(text)

    def begin(self, laps: Stopwatch, work: Work, plan: Plan) -> None:
        """Begins an attempt to make the step of this work, which this process measures with `laps`."""
        self._current, self._laps = Attempt(work.step, plan, {}, phases=work.phases), laps
        laps.collect_timings(self.is_observed)

    def end_own_part(self) -> None:
        """Records that this process has computed its part of the attempt."""
        self._own = [] if self._laps is None else self._laps.take_timings()

    def commit_alone(self) -> None:
        """Passes to the observer an attempt that this process has made without workers."""
        self.end_own_part()
        self._give({}, True, ())

    def conclude(self, answers: Mapping[int, Any], losses: Iterable[Loss], is_committed: bool) -> None:
        """Passes a committed attempt to the observer, with the answers of the workers by seat.

        `losses` are the workers that have ended since the commit.
        """
        if is_committed:
            self._give({seat: timings for seat, (_, timings) in answers.items()}, True, losses)

    def abort(self, answers: Mapping[int, Any], losses: Iterable[Loss]) -> None:
        """Passes an aborted attempt to the observer, with the workers that were lost in this attempt."""
        self.end_own_part()
        # A worker that was done before the attempt was aborted answers as after a step.
        timings = {seat: answer if isinstance(answer, list) else answer[1] for seat, answer in answers.items()}
        self._give(timings, False, losses)

    def _give(self, timings: Mapping[int, list[Timing]], is_committed: bool, losses: Iterable[Loss]) -> None:
        if self._current is not None and self.observer is not None:
            lost = {loss.seat: loss.shard for loss in losses if loss.seat in self._current.plan.replicas}
            measured = {CONTROLLER: self._own, **timings}
            self.observer.add_attempt(replace(self._current, timings=measured, is_committed=is_committed, lost=lost))
        self._current = None
