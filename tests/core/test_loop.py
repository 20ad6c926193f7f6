"""Epochs of steps, and the moments between them."""

import numpy as np
import pytest

from lockstep.core import loop
from lockstep.core.loop import Totals
from lockstep.core.metrics import Column
from lockstep.errors import BatchError


class Recorded:
    """A loop, its chain and its clock, all of which write down what happened."""

    def __init__(self, num_batches, stop_after=None, validation=None):
        self.calls = []
        self.records = []
        self.validation = validation or {}
        self._num_batches = num_batches
        self._stop_after = stop_after
        self._trained = 0
        self._seconds = iter(range(100))

    @property
    def stop_training(self):
        return self._trained == self._stop_after

    def batches(self):
        return iter(range(self._num_batches))

    def train(self, batch):
        self._trained += 1
        return np.array([float(batch + 1), 1.0, 0.0])

    def columns(self):
        return []

    def validate(self):
        return self.validation

    def __getattr__(self, moment):
        return lambda *arguments: self.calls.append((moment, *[index for index in arguments if isinstance(index, int)]))

    def fit(self, epochs, steps_per_epoch=None):
        record = lambda *arguments: self.records.append(arguments)  # noqa: E731
        loop.fit(self, epochs, steps_per_epoch, self, record, lambda: next(self._seconds))


def test_moments_come_in_kerass_order():
    fitted = Recorded(2, validation={"loss": 5.0})
    fitted.fit(1)
    assert fitted.calls == [
        ("on_train_begin",),
        ("on_epoch_begin", 0),
        ("on_train_batch_begin", 0),
        ("on_train_batch_end", 0),
        ("on_train_batch_begin", 1),
        ("on_train_batch_end", 1),
        ("on_test_begin",),
        ("on_test_end",),
        ("on_epoch_end", 0),
        ("on_train_end",),
    ]
    assert fitted.records == [(0, {"loss": 1.5, "val_loss": 5.0}, 1)]


@pytest.mark.parametrize(
    ("num_batches", "epochs", "steps_per_epoch", "stop_after", "losses"),
    [
        (3, 2, None, None, [2.0, 2.0]),
        (3, 2, 2, None, [1.5, 1.5]),
        (3, 2, 9, None, [2.0, 2.0]),
        (3, 2, None, 4, [2.0, 1.0]),  # inside the second epoch
        (3, 2, None, 3, [2.0]),  # with the last step of the first
    ],
)
def test_epochs_steps_and_stopping(num_batches, epochs, steps_per_epoch, stop_after, losses):
    fitted = Recorded(num_batches, stop_after)
    fitted.fit(epochs, steps_per_epoch)
    assert [logs["loss"] for _, logs, _ in fitted.records] == losses
    assert fitted.calls[-1] == ("on_train_end",)


def test_an_epoch_without_batches():
    with pytest.raises(BatchError) as caught:
        Recorded(0).fit(3)
    assert str(caught.value) == "An epoch holds at least one batch. Epoch 1 of 3 had none. Give more data."


def test_totals_are_means_over_all_that_came():
    totals = Totals(lambda: [Column("accuracy", 2)])
    totals.add(np.array([8.0, 4.0, 0.0, 4.0, 4.0]))
    assert dict(totals) == {"loss": 2.0, "accuracy": 1.0}
    totals.add(np.array([4.0, 2.0, 0.0, 0.0, 4.0]))
    assert dict(totals) == {"loss": 2.0, "accuracy": 0.5}
    assert len(totals) == 2


def test_totals_do_not_write_into_what_they_are_given():
    first = np.array([1.0, 1.0, 0.0])
    totals = Totals(list)
    totals.add(first)
    totals.add(first)
    assert first.tolist() == [1.0, 1.0, 0.0]
