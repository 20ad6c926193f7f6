"""Epochs of steps, and the moments between them."""

from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.callbacks import History
from lockstep.core.metric_objects import MetricObjects
from lockstep.core.metrics import Column
from lockstep.core.run_state import Run
from lockstep.errors import BatchError
from lockstep.launch.deferred_signals import Termination
from lockstep.training import loop
from lockstep.training.fit_options import FitOptions, Validation
from lockstep.training.loop import Loop, LoopPosition
from lockstep.training.step_logs import Totals


class Callbacks:
    """Writes down every moment it is called at, with its index."""

    def __init__(self):
        self.params = {}
        self.calls = []

    def __getattr__(self, moment):
        return lambda *arguments: self.calls.append((moment, *[index for index in arguments if isinstance(index, int)]))


class Numbers:
    """Data whose batches are numbers."""

    endless = once = False
    resumes = "at once"

    def __init__(self, num_batches):
        self.num_batches = num_batches

    def epoch(self, index, start=0, state=None):
        return iter(range(start, self.num_batches))


class Recorded:
    """A loop over a session that computes nothing, all of which write down what happened."""

    def __init__(self, num_batches, stop_after=None, place=None):
        self.num_batches, self.stop_after, self.place = num_batches, stop_after, place or LoopPosition()
        self.callbacks = Callbacks()
        self.places = []
        self.trained = 0
        self.run = Run()
        self.history = History(("cpu:0",))
        self.backend, self.columns, self.resumed, self.stop_training = object(), list, "", False
        self.metric_objects = MetricObjects([], None)
        self.quiet = SimpleNamespace(period=None, end=lambda: None)
        self.processes = SimpleNamespace(
            agree=lambda stop, asked: (self.trained == stop_after, asked), share=lambda make: make()
        )

    def step(self, batch):
        self.trained += 1
        return SimpleNamespace(sums=np.array([float(batch + 1), 1.0, 0.0]))

    def update_metrics(self, metrics):
        assert not metrics

    def fit(self, num_epochs, steps_per_epoch=None, validation=None):
        options = FitOptions(num_epochs, 0, steps_per_epoch, validation, (), None, 0)
        running = Loop(self, options, Numbers(self.num_batches), Numbers(1), self.callbacks, Termination())
        running.place = self.place
        for _ in running.run():
            self.places.append((self.place.epoch, self.place.batch))


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every question for the time is a second later, and an evaluation has a loss of 5."""
    seconds = iter(range(1000))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(loop, "evaluate", lambda *arguments: {"loss": 5.0})


def test_moments_come_in_kerass_order():
    fitted = Recorded(2)
    fitted.fit(1, validation=Validation("data"))
    assert fitted.callbacks.calls == [
        ("on_epoch_begin", 0),
        ("on_train_batch_begin", 0),
        ("on_train_batch_end", 0),
        ("on_train_batch_begin", 1),
        ("on_train_batch_end", 1),
        ("on_test_begin",),
        ("on_test_end",),
        ("on_epoch_end", 0),
    ]
    assert fitted.history.history == {"loss": [1.5], "val_loss": [5.0]}
    # From the epoch's begin to the end of its last step: opening the data, two steps, and their sums.
    assert fitted.history.seconds == [4.0]


@pytest.mark.parametrize(
    ("num_batches", "num_epochs", "steps_per_epoch", "stop_after", "losses"),
    [
        (3, 2, None, None, [2.0, 2.0]),
        (3, 2, 2, None, [1.5, 1.5]),
        (3, 2, 9, None, [2.0, 2.0]),
        (3, 2, None, 4, [2.0, 1.0]),  # inside the second epoch
        (3, 2, None, 3, [2.0]),  # with the last step of the first
    ],
)
def test_epochs_steps_and_stopping(num_batches, num_epochs, steps_per_epoch, stop_after, losses):
    fitted = Recorded(num_batches, stop_after)
    fitted.fit(num_epochs, steps_per_epoch)
    assert fitted.history["loss"] == losses
    assert fitted.callbacks.calls[-1][0] == "on_epoch_end"


@pytest.mark.parametrize("left_at", [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)])
def test_a_loop_is_taken_up_where_it_was_left(left_at):
    whole = Recorded(3)
    whole.fit(2)
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert whole.places == places[1:]
    epoch, batch = left_at
    sums = np.array([sum(range(1, batch + 1)), float(batch), 0.0]) if batch else np.zeros(0)
    rest = Recorded(3, place=LoopPosition(epoch, batch, sums, dict(Totals(list, sums)) if batch else {}))
    rest.fit(2)
    assert rest.places == places[places.index(left_at) + 1 :]
    assert rest.history.epoch == whole.history.epoch[epoch:]
    assert rest.history.history.get("loss", []) == whole.history["loss"][epoch:]


def test_an_epoch_without_batches():
    with pytest.raises(BatchError) as caught:
        Recorded(0).fit(3)
    assert str(caught.value) == (
        "Epoch 1 of 3 has no batch. Use data with at least one batch per epoch; a generator, for example, can be "
        "read only once."
    )


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
