"""Keras's BackupAndRestore: an interrupted run resumes as in Keras, with the bits of an uninterrupted one."""

import json
import sys
import time

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.core import growth
from lockstep.errors import CallbackError, ExactError, ModelError, StateError
from lockstep.launch.host import Host

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 40)
DEVICES = 1 if keras.config.backend() == "torch" else 3  # of the resumed run


def create_model():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.3), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


class Interrupting(keras.callbacks.Callback):
    """Raises when an epoch begins."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("interrupted")


def wrap_model(devices=1, **options):
    return lockstep.wrap(create_model(), devices=devices, **{"shards": 4, **options})


def fit(trainer, *callbacks, epochs=4, data=(X, Y), **options):
    options = {"batch_size": 16, **options}
    return trainer.fit(data, epochs=epochs, callbacks=list(callbacks), verbose=0, **options)


def interrupt_fit(folder, epoch=2, **options):
    with wrap_model() as trainer, pytest.raises(RuntimeError, match="interrupted"):
        fit(trainer, keras.callbacks.BackupAndRestore(folder, **options), Interrupting(epoch))


def test_an_interrupted_run_resumes_with_the_same_bits(tmp_path):
    with wrap_model() as trainer:
        whole = fit(trainer)
        digest = trainer.digest()
    folder = tmp_path / "backup"
    interrupt_fit(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["latest.weights.h5", "training_metadata.json"]
    # A run takes over the shards and the seed, as from a checkpoint, and may have other devices.
    with wrap_model(DEVICES, shards=None) as trainer:
        history = fit(trainer, keras.callbacks.BackupAndRestore(folder))
        assert trainer.digest() == digest
        assert trainer.num_steps == 12
        assert history.epoch == [2, 3]
        assert history.history["loss"] == whole.history["loss"][2:]
        assert not folder.exists()
        assert fit(trainer, epochs=1).epoch == [0]  # Keras would skip the epochs here too


def test_epochs_and_files_are_those_of_keras(tmp_path):
    options = {"batch_size": 16, "epochs": 4, "verbose": 0}
    plain = tmp_path / "plain"
    with pytest.raises(RuntimeError, match="interrupted"):
        create_model().fit(X, Y, callbacks=[keras.callbacks.BackupAndRestore(plain), Interrupting(2)], **options)
    interrupt_fit(tmp_path / "ours")
    assert sorted(path.name for path in plain.iterdir()) == [
        path.name for path in sorted((tmp_path / "ours").iterdir())
    ]
    ours = json.loads((tmp_path / "ours" / "training_metadata.json").read_text())
    assert {name: ours[name] for name in ("epoch", "batch")} == json.loads(
        (plain / "training_metadata.json").read_text()
    )
    # Keras resumes from the files of Lockstep, and Lockstep from those of Keras.
    model = create_model()
    expected = model.fit(X, Y, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "ours")], **options)
    with wrap_model() as trainer:
        found = fit(trainer, keras.callbacks.BackupAndRestore(plain))
        assert found.epoch == expected.epoch == [2, 3]
        assert int(trainer.model.optimizer.iterations) == int(model.optimizer.iterations) == 12
        assert trainer.num_steps == 12
    assert not plain.exists()


def test_the_same_trainer_resumes_after_an_interruption(tmp_path):
    def earlier(trainer):
        fit(trainer, epochs=1)

    with wrap_model() as trainer:
        earlier(trainer)
        fit(trainer)
        digest = trainer.digest()
    with wrap_model() as trainer:
        earlier(trainer)
        with pytest.raises(RuntimeError, match="interrupted"):
            fit(trainer, keras.callbacks.BackupAndRestore(tmp_path), Interrupting(3))
        fit(trainer, keras.callbacks.BackupAndRestore(tmp_path))
        assert trainer.digest() == digest


@pytest.mark.parametrize("options", [{"delete_checkpoint": False}, {"double_checkpoint": True}])
def test_a_backup_that_is_not_deleted_of_a_finished_run(options, tmp_path):
    interrupt_fit(tmp_path, **options)
    with wrap_model() as trainer:
        assert fit(trainer, keras.callbacks.BackupAndRestore(tmp_path, **options)).epoch == [2, 3]
    if "delete_checkpoint" in options:
        with wrap_model() as trainer:
            assert fit(trainer, keras.callbacks.BackupAndRestore(tmp_path, **options)).epoch == []
            assert trainer.num_steps == 12


def test_a_backup_within_an_epoch_is_refused_if_bits_must_be_equal(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq=2)
    message = r"BackupAndRestore\(save_freq=2\) saves inside an epoch.*Checkpoint\('.*', every=2\)"
    with wrap_model() as trainer, pytest.raises(ExactError, match=message):
        fit(trainer, backup)
    checkpoint = lockstep.Checkpoint(tmp_path / "instead", every=2)
    with wrap_model() as trainer:
        assert fit(trainer, checkpoint=checkpoint).epoch == [0, 1, 2, 3]
    with wrap_model(exact=False) as trainer:
        assert fit(trainer, backup, epochs=1).epoch == [0]


def test_a_backup_beside_a_checkpoint_is_refused(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with wrap_model() as trainer:
        with pytest.raises(
            CallbackError, match=r"BackupAndRestore\('.*backup'\) cannot be used together with checkpoint='.*run'"
        ):
            fit(trainer, backup, checkpoint=str(tmp_path / "run"))
        assert fit(trainer, checkpoint=str(tmp_path / "run"), epochs=1).epoch == [0]


def test_other_shards_than_the_backup_s_are_refused_before_the_model_is_loaded(tmp_path):
    interrupt_fit(tmp_path)
    with wrap_model(shards=2) as trainer:
        before = trainer.digest()
        with pytest.raises(StateError, match=r"has shards=4, which a resumed run must keep, and this run was given"):
            fit(trainer, keras.callbacks.BackupAndRestore(tmp_path))
        assert trainer.digest() == before


@pytest.mark.skipif(keras.config.backend() != "torch", reason="only PyTorch's replicas join while a run trains")
def test_replicas_that_joined_by_themselves_end_if_the_backup_has_no_shards_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.wrap"], "read_host", lambda: Host(2.0, 64 << 30, 1 << 20))
    monkeypatch.setattr(growth, "SECONDS_ALONE", 0.0)
    monkeypatch.setattr(growth, "MIN_STEP", 0.0)
    monkeypatch.setattr(growth, "_SECONDS_COMPARED", 1e9)  # they stay, whether they gain or not
    monkeypatch.delenv("LOCKSTEP_DEVICES", raising=False)
    with wrap_model(shards=1) as trainer:
        fit(trainer)
        digest = trainer.digest()
    with wrap_model(shards=1) as trainer, pytest.raises(RuntimeError, match="interrupted"):
        fit(trainer, keras.callbacks.BackupAndRestore(tmp_path), Interrupting(2))
    with wrap_model(None, shards=None) as trainer:
        end = time.monotonic() + 60
        while len(trainer.session.processes.replicas()) < 2:
            assert time.monotonic() < end
            fit(trainer, epochs=1, data=(np.tile(X, (4, 1)), np.tile(Y, 4)), batch_size=160)
        assert trainer.shards == 2
        history = fit(trainer, keras.callbacks.BackupAndRestore(tmp_path))
        assert (history.epoch, trainer.shards, trainer.devices) == ([2, 3], 1, ("cpu:0",))
        assert trainer.digest() == digest


def test_a_generator_cannot_be_read_again(tmp_path):
    def batches():
        yield from ((X[start : start + 16], Y[start : start + 16]) for start in range(0, 32, 16))

    def fit_generator(trainer, *callbacks):
        data = (batch for _ in range(4) for batch in batches())
        return fit(trainer, *callbacks, data=data, batch_size=None, steps_per_epoch=2)

    with wrap_model() as trainer, pytest.raises(RuntimeError, match="interrupted"):
        fit_generator(trainer, keras.callbacks.BackupAndRestore(tmp_path), Interrupting(2))
    with (
        wrap_model() as trainer,
        pytest.raises(ExactError, match="This data is a generator, which cannot be read from"),
    ):
        fit_generator(trainer, keras.callbacks.BackupAndRestore(tmp_path))


@pytest.mark.skipif(keras.config.backend() == "torch", reason="there a model has its variables when it is wrapped")
def test_a_model_without_variables_is_refused(tmp_path):
    model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with (
        lockstep.wrap(model, shards=4) as trainer,
        pytest.raises(ModelError, match=r"Begin the model with keras\.Input"),
    ):
        fit(trainer, keras.callbacks.BackupAndRestore(tmp_path))
