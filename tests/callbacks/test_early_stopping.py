"""When training stops, and with which weights it ends. The tables are Keras's meaning, row by row."""

import math
from typing import Any

import numpy as np
import pytest

import lockstep
from callbacks.fake_trainer import FakeTrainer, epochs, fit
from lockstep.backends.numpy import SGD, Dense
from lockstep.callbacks import EarlyStopping
from lockstep.errors import LockstepError

NAN = math.nan


@pytest.mark.parametrize(
    ("options", "losses", "num_epochs"),
    [
        ({}, [5, 4, 3, 2], 4),
        ({}, [5, 5, 5, 5], 2),  # patience 0: the first epoch without an improvement is the last
        ({"patience": 1}, [5, 5, 5, 5], 2),
        ({"patience": 2}, [5, 5, 5, 5], 3),
        ({"patience": 2}, [5, 6, 4, 6, 6, 6], 5),  # an improvement starts the count anew
        ({"patience": 2}, [5, 6, 5, 4], 3),  # as good is not better
        ({"min_delta": 1}, [5, 4, 3], 2),  # by exactly min_delta is not enough
        ({"min_delta": 1, "patience": 2}, [5, 4.5, 3.9, 3.5, 3.2, 1], 5),
        ({"mode": "max"}, [1, 2, 3, 3, 4], 4),
        ({"start_from_epoch": 3}, [1, 9, 9, 9, 9, 9], 5),  # epoch 3 is the first that counts, and the best so far
        ({"start_from_epoch": 3}, [1, 9, 9, 9, 8, 8, 7], 6),
        # Better than before, but never than the baseline: the count goes on, and ends at the next that is worse.
        ({"baseline": 3, "patience": 2}, [9, 8, 7, 8, 6], 4),
        ({"baseline": 3, "patience": 2}, [9, 2, 2.5, 2.5], 4),
        ({"patience": 2}, [NAN, NAN, 1], 2),
        ({"patience": 2}, [5, NAN, 4, NAN, NAN, 3], 5),
        ({}, [NAN, 4, 3, 2], 4),  # the very first epoch never stops training
    ],
)
def test_training_stops_after(options: dict[str, Any], losses: list[float], num_epochs: int) -> None:
    trainer = FakeTrainer()
    callback = EarlyStopping("loss", **options)
    fit(trainer, [callback], epochs("loss", losses))
    assert len(trainer.history.epoch) == num_epochs
    stopped = callback.stopped_epoch is not None
    assert stopped == trainer.stop_training
    if stopped:
        assert callback.stopped_epoch == num_epochs - 1


@pytest.mark.parametrize(
    ("name", "options", "values", "best_epoch"),
    [
        ("loss", {"patience": 2}, [5, 3, 4, 4], 1),  # stopped
        ("loss", {"patience": 9}, [5, 3, 4, 4], 1),  # ran to the end
        ("accuracy", {"patience": 9}, [0.1, 0.9, 0.8], 1),
        ("loss", {"patience": 9}, [3, 2, 1], 2),
        ("loss", {"patience": 9}, [NAN, NAN, NAN], 0),
        ("loss", {"patience": 9}, [NAN, 5, 6], 1),
        ("loss", {"patience": 3, "baseline": 1}, [5, 3, 4, 4], 1),  # none beats the baseline: the best there is
        ("loss", {"patience": 9, "start_from_epoch": 2}, [1, 2, 9, 8], 3),
    ],
)
def test_the_best_weights_are_restored(
    name: str, options: dict[str, Any], values: list[float], best_epoch: int
) -> None:
    trainer = FakeTrainer()
    callback = EarlyStopping(name, restore_best=True, **options)
    fit(trainer, [callback], epochs(name, values))
    assert callback.best_epoch == best_epoch
    assert trainer.weight == 2 * (best_epoch + 1)  # the weight is the number of steps made, two an epoch
    assert trainer.momentum == trainer.num_steps  # the optimizer's stays


def test_without_restore_best_the_last_weights_stay() -> None:
    trainer = FakeTrainer()
    fit(trainer, [EarlyStopping("loss", patience=2)], epochs("loss", [1, 2, 3]))
    assert trainer.weight == trainer.num_steps == 6


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_resumed_run_continues_its_count(cut: int) -> None:
    losses = [5, 3, 4, 3.5, 4, 4, 4]

    def callback() -> EarlyStopping:
        return EarlyStopping("loss", patience=4, restore_best=True)

    whole, halves = FakeTrainer(), FakeTrainer()
    saved = fit(whole, [callback()], epochs("loss", losses))
    half = fit(halves, [callback()], epochs("loss", losses[:cut]))
    # As after a crash: the state of the last step comes from the checkpoint, not what on_train_end made of it.
    for data, _ in halves.arrays.values():
        data[...] = halves.num_steps
    again = fit(halves, [callback()], epochs("loss", losses[cut:]), first=cut, state=half)
    assert whole.history.epoch == halves.history.epoch == list(range(6))
    assert {**saved[0]["state"], "best_weights": 0} == {**again[0]["state"], "best_weights": 0}
    assert whole.weight == halves.weight == 4


def test_a_second_fit_starts_from_zero() -> None:
    trainer, callback = FakeTrainer(), EarlyStopping("loss", patience=2, restore_best=True)
    fit(trainer, [callback], epochs("loss", [1, 2, 3]))
    fit(trainer, [callback], epochs("loss", [9, 8, 7]))
    assert (callback.best, callback.best_epoch, callback.stopped_epoch) == (7, 2, None)


def test_a_real_model_ends_with_the_bytes_of_its_best_epoch() -> None:
    x, y = np.random.default_rng(0).normal(size=(32, 4)), np.arange(32) % 3
    seen = []

    class Look(lockstep.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((logs["loss"], self.trainer.state()["model.0.weight"].data.tobytes()))

    with lockstep.wrap(Dense([4, 3], seed=1), SGD(40.0), "cross_entropy", devices=2, shards=2) as trainer:
        assert len(trainer.devices) == 2
        stopping = EarlyStopping("loss", patience=3, restore_best=True)
        trainer.fit((x, y), epochs=9, batch_size=8, callbacks=[Look(), stopping], verbose=0)
        assert stopping.best_epoch is not None
        assert seen[stopping.best_epoch][0] == min(loss for loss, _ in seen)
        assert trainer.state()["model.0.weight"].data.tobytes() == seen[stopping.best_epoch][1] != seen[-1][1]
        trainer.digest()  # and so do all replicas


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EarlyStopping(patience=-1),
            "patience must be an integer, 0 or more. Got -1. Use for example patience=0.",
        ),
        (
            lambda: EarlyStopping(start_from_epoch=1.5),  # type: ignore[arg-type]
            "start_from_epoch must be an integer, 0 or more. Got 1.5. Use for example start_from_epoch=0.",
        ),
        (
            lambda: EarlyStopping("speed"),
            "It is not known whether lower or higher values of 'speed' are better. Use mode='min' or mode='max'.",
        ),
        (
            lambda: fit(FakeTrainer(), [EarlyStopping()], epochs("loss", [1])),
            "The monitored metric 'val_loss' is not among the metrics of this run: 'loss'. Call fit with "
            "validation_data=.",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(LockstepError) as caught:
        make()
    assert str(caught.value) == message
