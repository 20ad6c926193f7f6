"""Epochs of steps, and the moments between them."""

import numpy as np
import pytest

from lockstep.core import loop
from lockstep.core.loop import Place, Totals
from lockstep.core.metrics import Column
from lockstep.errors import BatchError


class Recorded:
    """A loop, its chain and its clock, all of which write down what happened."""

    def __init__(self, num_batches, stop_after=None, validation=None):
        self.calls = []
        self.records = []
        self.place = Place()
        self.places = []
        self.validation = validation or {}
        self._num_batches = num_batches
        self._stop_after = stop_after
        self._trained = 0
        self._seconds = iter(range(100))

    def stops(self):
        return self._trained == self._stop_after

    def batches(self, start):
        return iter(range(start, self._num_batches))

    def train(self, batch):
        self._trained += 1
        return np.array([float(batch + 1), 1.0, 0.0])

    def others(self):
        return {}

    def columns(self):
        return []

    def validates(self, epoch):
        return bool(self.validation)

    def validate(self):
        return self.validation

    def record(self, *arguments):
        self.records.append(arguments)

    def step_made(self):
        self.places.append((self.place.epoch, self.place.batch))

    def epoch_made(self, logs):
        self.places.append((self.place.epoch, self.place.batch))

    def __getattr__(self, moment):
        return lambda *arguments: self.calls.append((moment, *[index for index in arguments if isinstance(index, int)]))

    def fit(self, epochs, steps_per_epoch=None):
        loop.fit(self, self.place, epochs, steps_per_epoch, self, lambda: next(self._seconds))


def test_moments_come_in_kerass_order():
    fitted = Recorded(2, validation={"loss": 5.0})
    fitted.fit(1)
    assert fitted.calls == [
        ("on_epoch_begin", 0),
        ("on_train_batch_begin", 0),
        ("on_train_batch_end", 0),
        ("on_train_batch_begin", 1),
        ("on_train_batch_end", 1),
        ("on_test_begin",),
        ("on_test_end",),
        ("on_epoch_end", 0),
    ]
    assert fitted.records == [(0, {"loss": 1.5, "val_loss": 5.0}, 3.0)]


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
    assert fitted.calls[-1][0] == "on_epoch_end"


@pytest.mark.parametrize("left_at", [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)])
def test_a_loop_is_taken_up_where_it_was_left(left_at):
    whole = Recorded(3)
    whole.fit(2)
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert whole.places == places[1:]
    rest = Recorded(3)
    epoch, batch = left_at
    sums = np.array([sum(range(1, batch + 1)), float(batch), 0.0]) if batch else np.zeros(0)
    rest.place = Place(epoch, batch, sums, dict(Totals(list, sums)) if batch else {})
    rest.fit(2)
    assert rest.places == places[places.index(left_at) + 1 :]
    assert [record[:2] for record in rest.records] == [record[:2] for record in whole.records[epoch:]]


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
