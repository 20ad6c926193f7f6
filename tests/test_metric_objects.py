"""Metric objects in training: values of the whole epoch, the same on any number of devices and shards."""

import csv

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.core import outputs
from lockstep.errors import BatchError, StateError
from metric_object_samples import Auroc, MacroF1, auroc, macro_f1

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((90, 6))
Y = (X[:, 0] + GENERATOR.standard_normal(90) > 0).astype(int)
DEVICES = [1, 2, 3]


def wrapped(metrics, devices=1, shards=4, **options):
    return lockstep.wrap(
        Dense([6, 2], seed=1), SGD(0.5), "cross_entropy", metrics=metrics, devices=devices, shards=shards, **options
    )


def both():
    return {"auroc": Auroc(), "accuracy": "accuracy", "macro": MacroF1(2)}


def whole(rows, labels):
    """The values over all rows at once."""
    predicted = rows.argmax(1)
    return {
        "auroc": auroc(rows[:, 1] - rows[:, 0], labels),
        "macro_f1": macro_f1(predicted, labels, 2),
        "macro_correct": (predicted == labels).mean(),
    }


def by_hand(num_epochs, batch_size):
    """What a plain loop gives: the values over each epoch's outputs, as they were when its batches came."""
    model, optimizer = Dense([6, 2], seed=1), SGD(0.5)
    with lockstep.wrap(model, optimizer, "cross_entropy", devices=1, shards=1) as trainer:
        for _ in range(num_epochs):
            rows = []
            for start in range(0, len(X), batch_size):
                part = slice(start, start + batch_size)
                rows.append(model(X[part]))
                trainer.step((X[part], Y[part]))
            yield whole(np.concatenate(rows), Y)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_evaluation_is_that_of_all_data_for_any_number_of_shards(shards):
    mine = both()
    with wrapped(mine, shards=shards) as trainer:
        found = trainer.evaluate((X, Y), batch_size=32)
        expected = whole(trainer.predict(X), Y)
    assert found.keys() == {"loss", "accuracy", *expected}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12)
    assert mine["auroc"].scores == []  # the script's own object does not grow


@pytest.mark.parametrize("shards", [1, 4])
def test_an_epoch_is_that_of_a_plain_loop(shards):
    with wrapped(both(), shards=shards) as trainer:
        history = trainer.fit((X, Y), epochs=3, batch_size=32, shuffle=False, verbose=0).history
    for epoch, expected in enumerate(by_hand(3, 32)):
        for name, value in expected.items():
            assert history[name][epoch] == pytest.approx(value, abs=1e-6)


class Looks(lockstep.Callback):
    """Looks at the values at every step, and evaluates in the middle of every epoch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))
        self.seen.append(self.trainer.evaluate((X[:20], Y[:20])))


def test_the_same_bits_on_any_number_of_devices_also_when_callbacks_look(tmp_path):
    found = []
    for devices in DEVICES:
        looks, path = Looks(), tmp_path / f"{devices}.csv"
        with wrapped(both(), devices) as trainer:
            assert len(trainer.devices) == devices
            options = {"epochs": 2, "batch_size": 32, "validation_data": (X[:40], Y[:40]), "verbose": 0}
            history = trainer.fit((X, Y), callbacks=[looks, lockstep.CSVLogger(path)], **options).history
            step = dict(trainer.step((X[:30], Y[:30])))
            found.append((history, looks.seen, step, trainer.evaluate((X, Y), batch_size=32)))
    assert found[0] == found[1] == found[2]
    history, seen, step, _ = found[0]
    assert {"auroc", "val_auroc", "macro_f1", "val_macro_f1", "macro_correct"} <= history.keys()
    assert list(csv.DictReader(path.read_text().splitlines()))[1]["val_auroc"] == str(history["val_auroc"][1])
    with wrapped(both()) as trainer:  # nobody looks
        quiet = trainer.fit((X, Y), **options).history
        assert quiet == history
        rows = trainer.predict(X[:30])
        assert trainer.step((X[:30], Y[:30]))["auroc"] == step["auroc"]  # of this batch alone
    assert seen[4]["macro_correct"] == pytest.approx(history["accuracy"][0])
    assert step["auroc"] == pytest.approx(whole(rows, Y[:30])["auroc"])


def test_logs_of_a_step_are_read_at_any_time():
    with wrapped([Auroc()]) as trainer:
        logs = [trainer.step((X[start : start + 30], Y[start : start + 30])) for start in (0, 30)]
        again = wrapped([Auroc()])
        expected = [again.step((X[start : start + 30], Y[start : start + 30]))["Auroc"] for start in (0, 30)]
        assert [each["Auroc"] for each in reversed(logs)] == list(reversed(expected))
        assert len(logs[0]) == 2
        assert "Auroc" in repr(logs[0])


class Leave(lockstep.Callback):
    """Ends the run as Ctrl-C does."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [2, 3, 5])  # in the middle, at the end of an epoch, in the middle of the second
def test_a_run_taken_up_in_an_epoch_has_the_history_of_one_that_was_not_left(tmp_path, after):
    options = {"epochs": 3, "batch_size": 32, "validation_data": (X[:40], Y[:40]), "verbose": 0}
    with wrapped(both()) as trainer:
        expected = trainer.fit((X, Y), **options).history
    checkpoint = lockstep.Checkpoint(tmp_path, every=1)
    with wrapped(both()) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.fit((X, Y), checkpoint=checkpoint, callbacks=[Leave(after + 1)], **options)
    with wrapped(both(), devices=2) as trainer:
        assert trainer.fit((X, Y), checkpoint=checkpoint, **options).history == expected
        assert trainer.num_steps == 9


def test_a_checkpoint_in_an_epoch_wants_the_same_metric_objects(tmp_path):
    options = {"epochs": 2, "batch_size": 32, "verbose": 0, "checkpoint": lockstep.Checkpoint(tmp_path, every=1)}
    with wrapped([]) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.fit((X, Y), callbacks=[Leave(3)], **options)
    with (
        wrapped([Auroc()]) as trainer,
        pytest.raises(StateError, match=r"metric objects none, and this run has \['Auroc'\]"),
    ):
        trainer.fit((X, Y), **options)
    with wrapped([Auroc()], exact=False) as trainer:
        assert len(trainer.fit((X, Y), **options).history["Auroc"]) == 2


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path):
    metric = Auroc()
    metric.generator = np.random.default_rng(0)
    with wrapped([metric]) as trainer:
        trainer.fit((X, Y), batch_size=45, verbose=0)
        with pytest.raises(StateError, match=r"cannot store the Generator at Auroc\.generator"):
            trainer.fit((X, Y), checkpoint=tmp_path, verbose=0)
        assert trainer.num_steps == 2


@pytest.mark.parametrize("devices", [1, 2])
def test_outputs_too_large_to_gather_change_nothing(monkeypatch, devices):
    monkeypatch.setattr(outputs, "LIMIT", 600)
    with wrapped([Auroc()], devices) as trainer:
        before = trainer.digest()
        with pytest.raises(BatchError, match="at most 0 MiB"):
            trainer.step((X, Y))
        if devices == 1:
            assert trainer.digest() == before
            assert trainer.num_steps == 0
            assert "Auroc" in trainer.step((X[:20], Y[:20]))


def test_verify_and_early_stopping_go_with_metric_objects():
    with wrapped([Auroc()]) as trainer:
        assert trainer.verify((X, Y), steps=2, devices=(1, 2), batch_size=30).equal
        stop = lockstep.EarlyStopping("val_Auroc", mode="max", patience=1)
        trainer.fit((X, Y), epochs=30, batch_size=90, validation_data=(X, Y), callbacks=[stop], verbose=0)
        assert len(trainer.history.epoch) <= 30
