"""What callbacks write into their logs, compared with Keras's own fit with the same callbacks."""

import csv

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers

import lockstep

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 40)
OPTIONS = {"batch_size": 16, "shuffle": False, "validation_data": (X, Y)}


def create_model():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def fit_both(make_callbacks, epochs=4, verbose=0):
    """The callbacks of a plain fit and of Lockstep's, and the two histories."""
    plain, ours = make_callbacks("plain"), make_callbacks("ours")
    expected = create_model().fit(X, Y, epochs=epochs, callbacks=plain, verbose=verbose, **OPTIONS)
    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        found = trainer.fit((X, Y), epochs=epochs, callbacks=ours, verbose=verbose, **OPTIONS)
    return plain, expected, ours, found


def assert_near(found, expected):
    assert found.epoch == expected.epoch
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-4, atol=1e-4, err_msg=name)


class Mine(keras.callbacks.Callback):
    """Writes a metric of its own at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = float(epoch)


class Seen(keras.callbacks.Callback):
    """Records the names of the logs at every call."""

    def __init__(self):
        super().__init__()
        self.moments = []

    def on_train_begin(self, logs=None):
        self.moments.append(("train begin", sorted(logs), dict(self.params)))

    def on_train_end(self, logs=None):
        self.moments.append(("train end", sorted(logs)))

    def on_epoch_begin(self, epoch, logs=None):
        self.moments.append(("epoch begin", epoch, sorted(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.moments.append(("epoch end", epoch, sorted(logs)))

    def on_train_batch_begin(self, batch, logs=None):
        self.moments.append(("batch begin", batch, sorted(logs)))

    def on_train_batch_end(self, batch, logs=None):
        self.moments.append(("batch end", batch, sorted(logs)))

    def on_test_end(self, logs=None):
        self.moments.append(("test end", sorted(logs)))


class Everywhere(keras.callbacks.Callback):
    """Writes at every call."""

    def on_train_begin(self, logs=None):
        logs["written"] = 0.0

    def on_train_end(self, logs=None):
        logs["written"] = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        logs["written"] = 0.0

    def on_epoch_end(self, epoch, logs=None):
        logs["written"] = 0.0
        if epoch == 1:
            del logs["accuracy"]

    def on_train_batch_begin(self, batch, logs=None):
        logs["written"] = 0.0

    def on_train_batch_end(self, batch, logs=None):
        logs["written"] = 0.0

    def on_test_end(self, logs=None):
        logs["written"] = 0.0


def test_a_callback_reads_what_an_earlier_one_wrote():
    def make(folder):
        return [Mine(), keras.callbacks.EarlyStopping(monitor="mine", mode="min", patience=0)]

    _, expected, _, found = fit_both(make, epochs=6)
    assert found.epoch == [0, 1]
    assert_near(found, expected)


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, min_delta=100.0, patience=1),
    ],
)
def test_learning_rates_reach_the_history_and_the_files(make_schedule, tmp_path):
    def make(name):
        files = keras.callbacks.ModelCheckpoint(str(tmp_path / name / "at-{learning_rate:.4f}.keras"))
        (tmp_path / name).mkdir()
        return [make_schedule(), files, keras.callbacks.CSVLogger(str(tmp_path / name / "log.csv"))]

    _, expected, _, found = fit_both(make)
    assert_near(found, expected)
    assert "learning_rate" in found.history
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "ours")]
    assert names[0] == names[1]
    assert len(names[0]) > 2
    plain, ours = (
        list(csv.DictReader((tmp_path / name / "log.csv").read_text().splitlines())) for name in ("plain", "ours")
    )
    assert [list(row) for row in ours] == [list(row) for row in plain]
    assert [row["learning_rate"] for row in ours] == [row["learning_rate"] for row in plain]


@pytest.mark.parametrize("seen_first", [False, True])
def test_logs_and_params_are_those_of_keras_at_every_call(seen_first):
    def make(folder):
        return [Seen(), Everywhere()] if seen_first else [Everywhere(), Seen()]

    plain, expected, ours, found = fit_both(make, epochs=2)
    place = 0 if seen_first else 1
    assert ours[place].moments == plain[place].moments
    assert ours[place].params == {"verbose": 0, "epochs": 2, "steps": 3}
    assert found.history["accuracy"][0] == pytest.approx(expected.history["accuracy"][0], abs=1e-5)
    assert np.isnan(found.history["accuracy"][1])  # Keras's list is shorter then; here every list has all epochs
    assert found.history["written"] == [0.0, 0.0]


class OwnSeen(lockstep.Callback):
    """A callback of Lockstep that records what earlier callbacks wrote, and writes for later ones."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, batch, logs):
        self.seen.append(("batch", "mine" in logs))

    def on_test_end(self, logs):
        self.seen.append(("test", sorted(logs)))

    def on_epoch_end(self, epoch, logs):
        self.seen.append(("epoch", logs.get("mine")))
        logs["ours"] = 2.0 * epoch


def test_lockstep_s_callbacks_share_the_logs_with_keras_s(tmp_path):
    before, after, stopping = OwnSeen(), OwnSeen(), keras.callbacks.EarlyStopping("ours", mode="min", patience=0)
    own = lockstep.callbacks.CSVLogger(tmp_path / "own.csv")
    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        history = trainer.fit((X, Y), epochs=5, callbacks=[before, Mine(), after, stopping, own], **OPTIONS)
    assert [each for each in before.seen if each[0] == "epoch"] == [("epoch", None)] * 2
    assert [each for each in after.seen if each[0] == "epoch"] == [("epoch", 0.0), ("epoch", 1.0)]
    assert ("test", ["accuracy", "loss"]) in after.seen
    assert history.history["mine"] == [0.0, 1.0]
    assert history.history["ours"] == [0.0, 2.0]
    assert "mine" in (tmp_path / "own.csv").read_text().splitlines()[0]


class Words(keras.callbacks.Callback):
    """Writes values that are not numbers."""

    def on_epoch_end(self, epoch, logs=None):
        logs["note"], logs["counts"], logs["rate"] = f"epoch {epoch}", [1, 2], np.float32(0.5)


def test_logs_that_are_not_numbers_are_in_the_history(tmp_path, capsys):
    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        own = [lockstep.callbacks.CSVLogger(tmp_path / "own.csv"), lockstep.callbacks.Log(print)]
        where = {"checkpoint": str(tmp_path / "run")}
        history = trainer.fit((X, Y), epochs=2, callbacks=[Words(), *own], **where, **OPTIONS)
    assert history.history["note"] == ["epoch 0", "epoch 1"]
    assert history.history["counts"] == [[1, 2], [1, 2]]
    assert history.history["rate"] == [0.5, 0.5]
    assert "note: epoch 1" in capsys.readouterr().out
    history.to_csv(tmp_path / "all.csv")
    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        again = trainer.fit((X, Y), epochs=3, callbacks=[Words(), *own], **where, **OPTIONS)
    assert again.history["note"] == ["epoch 0", "epoch 1", "epoch 2"]
    assert again.history["rate"] == [0.5] * 3


def test_a_checkpoint_keeps_the_best_by_what_a_callback_wrote(tmp_path):
    best = lockstep.Checkpoint(tmp_path / "run", best="mine_loss")

    class Falling(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["mine_loss"] = [3.0, 1.0, 2.0][epoch]

    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        trainer.fit((X, Y), epochs=3, callbacks=[Falling()], checkpoint=best, **{**OPTIONS, "verbose": 0})
        assert trainer.history.history["mine_loss"] == [3.0, 1.0, 2.0]
        trainer.restore(tmp_path / "run" / "best")
        assert trainer.num_steps == 6


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_a_progress_logger_shows_as_much_as_fit_was_asked_for(verbose, capsys):
    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        progress = keras.callbacks.ProgbarLogger()
        trainer.fit((X, Y), epochs=2, callbacks=[progress], **{**OPTIONS, "verbose": verbose})
        assert (progress.verbose, progress.epochs, progress.target) == (verbose, 2, 3)
    assert bool(capsys.readouterr().out) == bool(verbose)


def test_callbacks_may_be_none():
    with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
        assert trainer.fit((X, Y), callbacks=None, **{**OPTIONS, "verbose": 0}).epoch == [0]
