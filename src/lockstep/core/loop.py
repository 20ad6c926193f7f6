"""The loop: epochs of steps, with callbacks between them. Written once for every framework.

It knows no clock, no device and no framework; the trainer hands it what it needs.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np

from lockstep.core.metrics import Column, Sums, results
from lockstep.errors import BatchError


class Totals(Mapping[str, float]):
    """Running means over the steps of an epoch or an evaluation; they are worked out when they are read."""

    def __init__(self, columns: Callable[[], list[Column]]) -> None:
        self._columns = columns
        self._sums: Sums = np.zeros(0)

    def add(self, sums: Sums) -> None:
        """Takes one more step's sums."""
        self._sums = sums + self._sums if len(self._sums) else sums

    def __getitem__(self, name: str) -> float:
        """One value by name."""
        return results(self._sums, self._columns())[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(results(self._sums, self._columns()))

    def __len__(self) -> int:
        """The number of values."""
        return 1 + len(self._columns())


class Loop(Protocol):
    """What the loop calls: the trainer's own step and evaluation, callbacks, and the record."""

    @property
    def stop_training(self) -> bool:
        """Whether a callback has asked to stop."""

    def batches(self) -> Iterator[Any]:
        """The batches of the next epoch."""

    def train(self, batch: Any) -> Sums:
        """One step."""

    def columns(self) -> list[Column]:
        """The metrics in a step's sums."""

    def validate(self) -> Mapping[str, float]:
        """The validation's values, by their plain names; empty where there is none."""


def fit(loop: Loop, epochs: int, steps_per_epoch: int | None, chain: Any, record: Any, clock: Any) -> None:
    """Runs the epochs; `record` gets each one's logs and seconds of training."""
    chain.on_train_begin()
    logs: dict[str, float] = {}
    for epoch in range(epochs):
        chain.on_epoch_begin(epoch)
        started = clock()
        totals = Totals(loop.columns)
        index = -1
        for index, batch in enumerate(islice(loop.batches(), steps_per_epoch)):
            chain.on_train_batch_begin(index)
            totals.add(loop.train(batch))
            chain.on_train_batch_end(index, totals)
            if loop.stop_training:
                break
        if index < 0:
            raise BatchError(
                f"An epoch holds at least one batch. Epoch {epoch + 1} of {epochs} had none. Give more data."
            )
        logs = dict(totals)
        seconds = clock() - started
        chain.on_test_begin()
        validation = {f"val_{name}": value for name, value in loop.validate().items()}
        chain.on_test_end(validation)
        logs |= validation
        record(epoch, logs, seconds)
        chain.on_epoch_end(epoch, logs)
        if loop.stop_training:
            break
    chain.on_train_end(logs)
