"""The loop: epochs of steps, with callbacks between them. Written once for every framework.

It knows no clock, no device and no framework; the trainer hands it what it needs.
Where it stands is a `Place`, so a loop can be left after any step and taken up there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np

from lockstep.core.metric_kinds import merge
from lockstep.core.metrics import Column, Sums, results
from lockstep.errors import BatchError


class Totals(Mapping[str, float]):
    """Running means over the steps of an epoch or an evaluation; they are worked out when they are read."""

    def __init__(
        self,
        columns: Callable[[], list[Column]],
        sums: Sums | None = None,
        others: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._columns = columns
        self._others = others  # the values of metric objects, which are no sums
        self.sums: Sums = np.zeros(0) if sums is None else sums

    def add(self, sums: Sums) -> None:
        """Takes one more step's sums."""
        self.sums = sums + self.sums if len(self.sums) else sums

    def __getitem__(self, name: str) -> float:
        """One value by name."""
        found = results(self.sums, self._columns())
        return found[name] if name in found else self._others()[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(merge(results(self.sums, self._columns()), self._others()))

    def __len__(self) -> int:
        """The number of values."""
        return 1 + len(self._columns()) + len(self._others())


@dataclass
class Place:
    """Where a loop stands: the epoch, the batches of it that are done, and what these gave."""

    epoch: int = 0
    batch: int = 0
    sums: Sums = field(default_factory=lambda: np.zeros(0))
    logs: dict[str, float] = field(default_factory=dict)  # what the sums come to, where nothing is left to compute
    seconds: float = 0.0
    stopped: bool = False  # whether a callback has ended the training


class Loop(Protocol):
    """What the loop calls: the trainer's own step and evaluation, and what is done between them."""

    def stops(self) -> bool:
        """Whether a callback has asked to stop, as all processes agree; asked once after every step and epoch."""

    def batches(self, start: int) -> Iterator[Any]:
        """The batches of the epoch from batch `start` on."""

    def train(self, batch: Any) -> Sums:
        """One step."""

    def columns(self) -> list[Column]:
        """The metrics in a step's sums."""

    def others(self) -> Mapping[str, float]:
        """The values of the metric objects over the epoch so far."""

    def validates(self, epoch: int) -> bool:
        """Whether a validation follows this epoch."""

    def validate(self) -> Mapping[str, float]:
        """The validation's values, by their plain names."""

    def record(self, epoch: int, logs: Mapping[str, float], seconds: float) -> None:
        """Keeps an epoch's values."""

    def step_made(self) -> None:
        """Called between two steps of an epoch."""

    def epoch_made(self, logs: Mapping[str, float]) -> None:
        """Called after an epoch and its callbacks, with what these wrote into `logs`; the next epoch comes now."""


def fit(loop: Loop, place: Place, epochs: int, steps_per_epoch: int | None, chain: Any, clock: Any) -> None:
    """Runs the epochs from `place` on, which it moves along; training's beginning and end are the caller's."""
    while place.epoch < epochs and not place.stopped:
        chain.on_epoch_begin(place.epoch)
        started = clock() - place.seconds
        totals = Totals(loop.columns, place.sums, loop.others)
        begun = place.batch
        left = None if steps_per_epoch is None else max(steps_per_epoch - place.batch, 0)
        for batch in islice(loop.batches(place.batch), left):
            chain.on_train_batch_begin(place.batch)
            totals.add(loop.train(batch))
            place.batch, place.sums, place.seconds = place.batch + 1, totals.sums, clock() - started
            chain.on_train_batch_end(place.batch - 1, totals)
            place.stopped = loop.stops()
            if place.stopped:
                break
            loop.step_made()
        if not place.batch:
            raise BatchError(
                f"An epoch holds at least one batch. Epoch {place.epoch + 1} of {epochs} had none. Give more data."
            )
        # May wait for a device, as part of the epoch.
        logs = dict(totals) if place.batch > begun else merge(place.logs, loop.others())
        place.seconds = clock() - started
        _end(loop, place, logs, chain)
        place.stopped |= loop.stops()
        loop.epoch_made(logs)


def _end(loop: Loop, place: Place, logs: dict[str, float], chain: Any) -> None:
    """Ends an epoch: validation, record, callbacks; the place is then the next one's beginning."""
    if loop.validates(place.epoch):
        chain.on_test_begin()
        validation = dict(loop.validate())
        chain.on_test_end(dict(validation))  # callbacks may write into theirs
        logs |= {f"val_{name}": value for name, value in validation.items()}
    epoch = place.epoch
    loop.record(epoch, logs, place.seconds)
    place.epoch, place.batch, place.sums, place.seconds, place.logs = epoch + 1, 0, np.zeros(0), 0.0, {}
    chain.on_epoch_end(epoch, logs)
