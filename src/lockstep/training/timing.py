"""Where the time of a fit goes, in every process."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lockstep.core.batches import count
from lockstep.core.time_breakdown import Breakdown
from lockstep.processes.commands import take_times
from lockstep.training.session import Session


class StepTimes:
    """Adds up, over the epochs of one `fit`, the seconds that every process has measured."""

    def __init__(self, session: Session, has_callbacks: bool) -> None:
        self._session = session
        self._has_callbacks = has_callbacks
        self._parts: dict[int, Counter[str]] = {}
        self._seconds = 0.0
        self._num_steps = 0
        self._num_examples = 0
        session.ask(take_times)  # what was before does not count

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, with the time that this process waits for them counted as input."""
        began = time.perf_counter()
        try:
            while True:
                laps = self._session.processes.member.laps
                laps.start()
                batch = next(batches, None)
                laps.lap("input")
                if batch is None:
                    return
                self._num_steps += 1
                self._num_examples += count(batch)
                yield batch
        finally:
            self._seconds += time.perf_counter() - began

    def breakdown(self) -> Breakdown:
        """Return everything so far."""
        for replica, seconds in self._session.ask(take_times).items():
            self._parts.setdefault(replica, Counter()).update(seconds)
        replicas = sorted(self._parts)
        devices = [self._session.devices[replica] for replica in replicas]
        parts = [dict(self._parts[replica]) for replica in replicas]
        counted = self._seconds, self._num_steps, self._num_examples
        return Breakdown(devices, parts, *counted, self._has_callbacks)
