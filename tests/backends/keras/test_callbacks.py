"""Keras callbacks: their model and params, stopping, weights and files."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.callbacks.keras_adapter import is_keras_callback
from lockstep.callbacks.keras_backups import adapt_callback
from lockstep.errors import CallbackError

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.random.Generator(np.random.PCG64(5)).standard_normal((40, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def wrap_model(rate=0.1):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return lockstep.wrap(model, devices=2, shards=2)


def fit(trainer, *callbacks, epochs=3):
    options = {"validation_data": (X, Y), "verbose": 0, "shuffle": False}
    return trainer.fit((X, Y), epochs=epochs, batch_size=16, callbacks=list(callbacks), **options)


class Writing(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def set_model(self, model):
        super().set_model(model)
        self.calls.append(("model", self.params))  # Keras sets the params after it

    def on_train_begin(self, logs=None):
        self.calls.append(("begin", self.params["epochs"], self.params["steps"]))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append((epoch, sorted(logs)))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append((batch, "accuracy" in logs))


def test_a_callback_gets_the_model_the_params_and_the_logs():
    callback = Writing()
    with wrap_model() as trainer:
        history = fit(trainer, callback, epochs=1)
        assert callback.model is trainer.model
    names = ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert callback.calls == [("model", None), ("begin", 1, 3), (0, True), (1, True), (2, True), (0, names)]
    assert sorted(history.history) == names


def test_early_stopping_stops_and_restores_the_best_weights():
    with wrap_model() as trainer:
        stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=100.0, patience=1, restore_best_weights=True)
        history = fit(trainer, stopping, epochs=10)
        assert len(history.epoch) == 2
        best = history.history["val_loss"][0]
        assert trainer.evaluate((X, Y))["loss"] == pytest.approx(best)


def test_a_plateau_lowers_the_learning_rate_of_the_next_step():
    with wrap_model(0.5) as trainer:
        fit(trainer, keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, min_delta=100.0, patience=1), epochs=3)
        assert trainer.learning_rates[0] == pytest.approx(0.005)


def test_checkpoints_and_logs_are_written(tmp_path):
    with wrap_model() as trainer:
        fit(
            trainer,
            keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="val_loss"),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
            epochs=2,
        )
        again = keras.models.load_model(tmp_path / "best.keras")
        np.testing.assert_allclose(again.predict(X, verbose=0), trainer.predict(X), rtol=1e-5, atol=1e-6)
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == "epoch,accuracy,loss,val_accuracy,val_loss"


def test_tensorboard_writes_its_events(tmp_path):
    with wrap_model() as trainer:
        fit(trainer, keras.callbacks.TensorBoard(str(tmp_path), update_freq=1), epochs=2)
    found = {path.parent.name for path in tmp_path.rglob("events.out.tfevents.*")}
    assert found == {"train", "validation"}


class Ending(keras.callbacks.Callback):
    """Stops in the middle of an epoch, and looks at a batch under its old name."""

    seen = 0

    def on_batch_end(self, batch, logs=None):
        self.seen += 1
        self.model.stop_training = self.seen == 2


def test_a_callback_stops_in_the_middle_of_an_epoch_and_a_later_fit_continues():
    with wrap_model() as trainer:
        fit(trainer, Ending(), epochs=9)
        assert trainer.num_steps == 2
        fit(trainer, epochs=1)
        assert trainer.num_steps == 5


def test_a_callback_class_instead_of_an_instance_is_refused():
    with wrap_model() as trainer, pytest.raises(CallbackError, match=r"is the class EarlyStopping, not an instance"):
        fit(trainer, keras.callbacks.EarlyStopping)


def test_a_learning_rate_scheduler_sets_the_rate_of_the_step():
    with wrap_model() as trainer:
        before = trainer.digest()
        fit(trainer, keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0), epochs=1)
        state = trainer.state()
        assert all(np.array_equal(state[f"model.{name}"].data, value) for name, value in weights(trainer).items())
        assert trainer.learning_rates == (0.0,)
        assert trainer.digest() != before  # the steps are counted


def weights(trainer):
    keras.utils.set_random_seed(2)
    fresh = wrap_model()
    names = [name.removeprefix("model.") for name in trainer.state() if name.startswith("model.")]
    return {name: fresh.state()[f"model.{name}"].data for name in names}


def test_keras_callbacks_are_recognized():
    assert is_keras_callback(keras.callbacks.History())
    assert not is_keras_callback(keras.callbacks.History)
    assert not is_keras_callback(lockstep.Callback())
    assert adapt_callback(3) == 3
