"""Measures in every process how long the parts of each step of a `fit` take."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lockstep.core.batches import count
from lockstep.core.time_breakdown import Breakdown
from lockstep.processes.commands import take_times
from lockstep.training.session import Session


class StepTimes:
    """Adds up the seconds that every process has measured, over the epochs of one `fit`."""

    def __init__(self, session: Session, has_callbacks: bool) -> None:
        self._session = session
        self._has_callbacks = has_callbacks
        self._parts: dict[int, Counter[str]] = {}
        self._devices: dict[int, str] = {}
        self._seconds = 0.0
        self._num_steps = 0
        self._num_examples = 0
        session.ask(take_times)  # resets the times to 0

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, and adds the time in which this process waits for a batch to the input time."""
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
        """Returns how the time so far was spent, for each replica."""
        for replica, seconds in self._session.ask(take_times).items():
            self._parts.setdefault(replica, Counter()).update(seconds)
            self._devices[replica] = self._session.devices[replica]
        replicas = sorted(self._parts)
        devices = [self._devices[replica] for replica in replicas]
        parts = [dict(self._parts[replica]) for replica in replicas]
        counted = self._seconds, self._num_steps, self._num_examples
        return Breakdown(devices, parts, *counted, self._has_callbacks)
