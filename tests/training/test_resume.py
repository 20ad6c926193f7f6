"""Checkpoints as a script meets them: saved by hand and by fit, taken up, refused."""

import json
import math
import os
import re
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.checkpoint import CheckpointFolder, Writer, read, snapshot, write
from lockstep.errors import CheckpointError, ExactError, LockstepError, SaveError, StateError

x = np.random.default_rng(0).normal(size=(61, 6))
y = np.arange(61) % 3


def wrapped(sizes=(6, 8, 3), lr=0.3, **options):
    options = {"shards": 4, **options}
    return lockstep.wrap(Dense(sizes, seed=1, dropout=0.2), SGD(lr, momentum=0.9), "cross_entropy", **options)


@pytest.fixture
def every_checkpoint_written(monkeypatch):
    """Steps wait for the writer; without this, a newer checkpoint may replace one that has not been written yet."""
    submit = Writer.submit
    monkeypatch.setattr(Writer, "submit", lambda self, job, keep=False: (submit(self, job, keep), self.wait()))


def fitted(trainer, folder=None, epochs=2, batch_size=16, **options):
    return trainer.fit((x, y), epochs=epochs, batch_size=batch_size, checkpoint=folder, verbose=0, **options)


@pytest.fixture
def saved(tmp_path):
    """A run of two epochs, and where it was saved by hand."""
    trainer = wrapped()
    fitted(trainer)
    trainer.save(tmp_path / "saved")
    return trainer, tmp_path / "saved"


# -- by hand


def test_a_restored_trainer_goes_on_with_the_same_bits(saved):
    one, path = saved
    two = wrapped(lr=9.9)
    two.restore(path)
    assert two.digest() == one.digest()
    assert two.learning_rates == (0.3,)
    assert two.num_steps == one.num_steps == 8
    fitted(one)
    fitted(two)
    assert two.digest() == one.digest()


@pytest.mark.parametrize("devices", [2, 3])
def test_another_number_of_devices_is_fine(saved, devices):
    one, path = saved
    with wrapped(devices=devices) as two:
        assert len(two.devices) == devices
        two.step((x, y))  # its workers hold another state now
        two.restore(path)
        assert two.digest() == one.digest()
        fitted(one)
        fitted(two)
        assert two.digest() == one.digest()


def test_the_arrays_are_there_without_any_framework(saved):
    trainer, path = saved
    arrays = lockstep.load_arrays(path)
    assert set(arrays) == {
        *trainer.model.parameters,
        *(f"optimizer.{name}.momentum" for name in trainer.model.parameters),
    }
    for name, value in trainer.model.parameters.items():
        assert arrays[name].tobytes() == value.tobytes()


def test_saving_over_a_checkpoint_replaces_it(saved):
    trainer, path = saved
    trainer.step((x, y))
    trainer.save(path)
    assert read(path).facts["step"] == 9


def test_the_manifest_tells_a_person_what_it_is(saved):
    trainer, path = saved
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    wanted = {"step": 8, "epoch": 2, "seed": 0, "shards": 4, "threads": 1, "framework": "numpy", "exact": True}
    assert {name: manifest[name] for name in wanted} == wanted
    assert manifest["versions"]["numpy"] == np.__version__
    assert set(manifest["tensors"]) == set(trainer.state())
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]


# -- refused, with both values


def changed(path, **facts):
    """The same checkpoint with other facts, whole and checksummed."""
    snapshot = read(path)
    write(path, replace(snapshot, facts={**snapshot.facts, **facts}))


def numpy_version():
    return (
        f"The checkpoint was saved with numpy 0.1, and this run has numpy {np.__version__}, so its results may differ"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shards": 8},
            "The checkpoint has shards=4, which a resumed run must keep, and this run was given shards=8. Leave shards "
            "out, or use shards=4.",
        ),
        (
            {"threads": 2},
            (
                "The checkpoint has threads=1, which a resumed run must keep, and this run was given threads=2. Leave "
                "threads out, or use threads=1, or exact=False to continue with another value."
            ),
        ),
        (
            {"seed": 5},
            "The checkpoint has seed=0, which a resumed run must keep, and this run was given seed=5.",
        ),
        ({"sizes": (6, 9, 3)}, "'0.weight' is (6, 8) in the checkpoint and (6, 9) in the model"),
    ],
)
def test_a_run_with_other_choices(saved, options, message):
    _, path = saved
    trainer = wrapped(**options)
    before = trainer.digest()
    with pytest.raises(StateError, match=re.escape(message)):
        trainer.restore(path)
    assert trainer.digest() == before


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        ({"framework": "torch"}, StateError, "This checkpoint was saved with torch, and the model is a numpy model."),
        (
            {"optimizer": "torch.optim.Adam"},
            StateError,
            "The checkpoint was saved with torch.optim.Adam, and this run has lockstep",
        ),
        (
            {"numbers": [{"lr": 1.0}, {"lr": 2.0}]},
            StateError,
            "The checkpoint has 2 groups of parameters, and the optimizer has 1.",
        ),
        ({"exact": False}, ExactError, "This checkpoint was saved with exact=False, so a run with exact=True cannot"),
        ({"device": "cuda"}, ExactError, "saved with device type cuda, and this run has device type cpu, so"),
        ({"versions": {"numpy": "0.1", "bits": snapshot.BITS}}, ExactError, numpy_version()),
        ({"versions": {"numpy": np.__version__, "bits": 0}}, ExactError, "saved with Lockstep arithmetic 0, and"),
        (
            {"step": "8"},
            CheckpointError,
            "because its manifest is damaged or was not written by Lockstep: it has step='8'.",
        ),
        (
            {"step": True},
            CheckpointError,
            "because its manifest is damaged or was not written by Lockstep: it has step=True.",
        ),
        (
            {"versions": None},
            CheckpointError,
            "because its manifest is damaged or was not written by Lockstep: it has versions=None.",
        ),
        (
            {"step": -1},
            CheckpointError,
            "because it is damaged or was not written by Lockstep: it has step=-1 and epoch=2.",
        ),
        (
            {"epoch": -1},
            CheckpointError,
            "because it is damaged or was not written by Lockstep: it has step=8 and epoch=-1.",
        ),
        (
            {"shards": 0},
            CheckpointError,
            "because it is damaged or was not written by Lockstep: shards must be an integer",
        ),
        (
            {"threads": -3},
            CheckpointError,
            "because it is damaged or was not written by Lockstep: threads must be an integer",
        ),
        ({"numbers": [5]}, StateError, "Group 0 is 5 in the checkpoint, not a dict of hyperparameters by name."),
        ({"numbers": [[]]}, StateError, "Group 0 is [] in the checkpoint, not a dict of hyperparameters by name."),
        ({"numbers": [{1: 0.1}]}, StateError, "Group 0 is {1: 0.1} in the checkpoint, not a dict of hyperparameters"),
        ({"numbers": [{"lr": ""}]}, StateError, "Group 0 has lr='' in the checkpoint and lr=0.3 in the optimizer."),
        ({"numbers": [{"lr": None}]}, StateError, "Group 0 has lr=None in the checkpoint and lr=0.3 in the optimizer."),
        ({"numbers": [{"lr": [1]}]}, StateError, "Group 0 has lr=[1] in the checkpoint and lr=0.3 in the optimizer."),
        ({"numbers": [{"lr": True}]}, StateError, "Group 0 has lr=True in the checkpoint and lr=0.3 in the optimizer."),
        ({"numbers": [{"lr": math.nan}]}, StateError, "Group 0 has lr=nan in the checkpoint and lr=0.3 in the"),
        ({"numbers": [{"momentum": None}]}, StateError, "Group 0 has momentum=None in the checkpoint and momentum="),
        ({"numbers": [{"step": 1}]}, StateError, "Group 0 has the hyperparameter 'step' in the checkpoint, and the"),
    ],
)
def test_a_checkpoint_of_something_else(saved, facts, error, message):
    _, path = saved
    changed(path, **facts)
    trainer = wrapped()
    before = trainer.digest()
    with pytest.raises(error, match=re.escape(message)):
        trainer.restore(path)
    assert trainer.digest() == before


def test_a_missing_and_a_strange_array(saved):
    _, path = saved
    snapshot = read(path)
    whole = dict(snapshot.state)
    write(path, replace(snapshot, state={name: whole[name] for name in whole if name != "model.1.bias"}))
    with pytest.raises(StateError, match=re.escape("'1.bias' is missing from the checkpoint.")):
        wrapped().restore(path)
    write(path, replace(snapshot, state={**whole, "model.2.bias": whole["model.1.bias"]}))
    with pytest.raises(StateError, match=re.escape("'2.bias' is not in the model.")):
        wrapped().restore(path)


def test_exact_false_goes_on_with_other_versions_and_threads(saved):
    _, path = saved
    changed(path, versions={"numpy": "0.1", "bits": 0})
    trainer = wrapped(exact=False, threads=2)
    trainer.restore(path)
    assert trainer.num_steps == 8
    assert trainer.digest().startswith("inexact:")
    trainer.save(path)
    assert read(path).facts["exact"] is False


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        wrapped().restore(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("float32", "'0.weight' is float64 in the checkpoint and float32 in the model")],
)
def test_another_type(saved, dtype, message):
    _, path = saved
    other = Dense((6, 8, 3), seed=1, dtype=dtype)
    with pytest.raises(StateError, match=re.escape(message)):
        lockstep.wrap(other, SGD(0.3, momentum=0.9), "cross_entropy").restore(path)


def test_another_way_to_compute_the_step(saved):
    _, path = saved
    with pytest.raises(ExactError, match=r"saved with clip_norm=None, and this run has clip_norm=0\.5"):
        wrapped(clip_norm=0.5).restore(path)


def test_more_devices_than_the_run_has_shards(tmp_path):
    trainer = wrapped(shards=1)
    trainer.step((x, y))
    trainer.save(tmp_path / "saved")
    with (
        wrapped(shards=None, devices=2) as two,
        pytest.raises(
            StateError, match=r"has shards=1, which a resumed run must keep, and this run has 2 devices, each of which"
        ),
    ):
        two.restore(tmp_path / "saved")


@pytest.mark.parametrize("seed", [None, 5])
def test_a_run_keeps_its_seed_and_with_it_its_order(tmp_path, seed):
    whole = wrapped(seed=5)
    fitted(whole)
    fitted(wrapped(seed=5), tmp_path, epochs=1)
    trainer = wrapped(seed=seed)
    fitted(trainer, tmp_path)
    assert trainer.digest() == whole.digest()


def test_an_explicit_seed_of_0_is_a_choice_too(tmp_path):
    fitted(wrapped(seed=5), tmp_path, epochs=1)
    with pytest.raises(StateError, match="has seed=5, which a resumed run must keep, and this run was given seed=0"):
        fitted(wrapped(seed=0), tmp_path)


# -- by fit


def test_a_finished_folder_says_so_and_gives_the_saved_history(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    one = fitted(wrapped(), "ckpt/", epochs=1)
    two = wrapped()
    history = fitted(two, "ckpt/", epochs=1)
    assert capfd.readouterr().err == "ckpt/ already holds 1 of 1 epochs; raise epochs or name another folder\n"
    assert (history.history, history.epoch) == (one.history, one.epoch)
    assert two.num_steps == 4


def test_raising_epochs_goes_on(tmp_path):
    fitted(wrapped(), tmp_path, epochs=1)
    trainer, whole = wrapped(), wrapped()
    history = fitted(trainer, tmp_path, epochs=3)
    assert history.history == fitted(whole, epochs=3).history
    assert trainer.digest() == whole.digest()


class StopAfter(lockstep.Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        self.trainer.stop_training = epoch + 1 == self.epochs


def test_a_folder_that_holds_more_than_was_asked_for(tmp_path, capfd):
    fitted(wrapped(), tmp_path, epochs=2)
    fitted(wrapped(), tmp_path, epochs=1)
    said = f"{tmp_path} already holds 2 epochs, more than the 1 asked for; raise epochs or name another folder\n"
    assert capfd.readouterr().err == said


class Ended(lockstep.Callback):
    logs = None

    def on_train_end(self, logs=None):
        self.logs = dict(logs)


def test_training_ends_with_the_last_epochs_logs_on_a_finished_folder_too(tmp_path):
    one, two = Ended(), Ended()
    fitted(wrapped(), tmp_path, callbacks=[one])
    fitted(wrapped(), tmp_path, callbacks=[two])
    assert one.logs == two.logs
    assert one.logs.keys() == {"loss"}


class TermInValidation(lockstep.Callback):
    def on_test_begin(self, logs=None):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_the_last_validation_is_answered_too(tmp_path):
    with pytest.raises(SystemExit) as leaving:
        fitted(wrapped(), tmp_path, epochs=1, validation_data=(x, y), callbacks=[TermInValidation()])
    assert leaving.value.code == 0
    assert os.listdir(tmp_path / "step-00000004")


def test_the_best_is_written_however_slow_the_disk(tmp_path, monkeypatch):
    writing = CheckpointFolder.save

    def slow(self, snapshot, step):
        time.sleep(0.1)
        return writing(self, snapshot, step)

    class Pretended(lockstep.Callback):
        values = (0.1, 0.9, 0.3, 0.4, 0.35, 0.2)

        def on_epoch_end(self, epoch, logs=None):
            logs["val_accuracy"] = self.values[epoch]

    monkeypatch.setattr(CheckpointFolder, "save", slow)
    fitted(wrapped(), lockstep.Checkpoint(tmp_path, every=1, best="val_accuracy"), epochs=6, callbacks=[Pretended()])
    assert os.readlink(tmp_path / "best") == "step-00000008"


def test_a_run_that_a_callback_ended_is_over_until_more_epochs_are_asked_for(tmp_path, capfd):
    fitted(wrapped(), tmp_path, epochs=3, callbacks=[StopAfter(2)])
    trainer = wrapped()
    assert fitted(trainer, tmp_path, epochs=3).epoch == [0, 1]
    said = f"{tmp_path} holds a run that a callback ended after 2 of 3 epochs; raise epochs or name another folder\n"
    assert capfd.readouterr().err == said
    assert fitted(trainer, tmp_path, epochs=4).epoch == [0, 1, 2, 3]


def test_early_stopping_gives_its_best_weights_back_on_a_finished_folder_too(tmp_path):
    def run():
        trainer = wrapped()
        fitted(trainer, tmp_path, epochs=3, callbacks=[lockstep.EarlyStopping("loss", mode="max", restore_best=True)])
        return trainer.digest()

    assert run() == run()


@pytest.mark.parametrize(("every", "steps"), [("epoch", [0, 4, 8]), (3, [0, 3, 6, 8]), (4, [0, 4, 8]), (100, [0, 8])])
def test_when_it_saves(tmp_path, every, steps, every_checkpoint_written):
    fitted(wrapped(), lockstep.Checkpoint(tmp_path, every=every, keep=None))
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("s")) == [f"step-{s:08}" for s in steps]


def test_the_best_stays_and_can_be_restored_by_name(tmp_path):
    trainer = wrapped()
    history = fitted(trainer, lockstep.Checkpoint(tmp_path, keep=1, best="val_loss"), epochs=6, validation_data=(x, y))
    best = int(np.argmin(history.history["val_loss"]))
    assert os.readlink(tmp_path / "best") == f"step-{4 * (best + 1):08}"
    trainer.restore(tmp_path / "best")
    assert trainer.evaluate((x, y), batch_size=16)["loss"] == history.history["val_loss"][best]


def test_a_best_that_is_no_metric(tmp_path):
    with pytest.raises(LockstepError, match="val_accuracy"):
        fitted(wrapped(), lockstep.Checkpoint(tmp_path, best="val_accuracy"), epochs=1)


def test_a_checkpoint_in_mid_epoch_has_no_say_in_which_is_the_best(tmp_path, every_checkpoint_written):
    schedule = lockstep.Checkpoint(tmp_path, every=3, keep=None, best="loss")
    history = fitted(wrapped(), schedule, epochs=4)
    best = int(np.argmin(history.history["loss"]))
    assert os.readlink(tmp_path / "best") == f"step-{4 * (best + 1):08}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, "the checkpoint has batch_size=16, and this run has batch_size=8."),
        ({"steps_per_epoch": 2}, "the checkpoint has steps_per_epoch=None, and this run has steps_per_epoch=2."),
    ],
)
def test_other_data_than_the_run_began_with(tmp_path, options, message):
    fitted(wrapped(), tmp_path, epochs=1)
    with pytest.raises(StateError, match=re.escape(message)):
        fitted(wrapped(), tmp_path, **options)


def test_other_callbacks_than_the_run_began_with(tmp_path):
    fitted(wrapped(), tmp_path, epochs=1, callbacks=[lockstep.EMA(0.9)])
    with pytest.raises(StateError, match=r"the states of these callbacks: EMA; fit\(\) was given none"):
        fitted(wrapped(), tmp_path)


def test_a_generator_cannot_be_resumed(tmp_path):
    def generator():
        for start in range(0, 61, 16):
            yield x[start : start + 16], y[start : start + 16]

    wrapped().fit(generator(), steps_per_epoch=2, checkpoint=tmp_path, verbose=0)
    with pytest.raises(ExactError, match="This data is a generator, which cannot be read from the batch"):
        wrapped().fit(generator(), epochs=2, steps_per_epoch=2, checkpoint=tmp_path, verbose=0)


def test_a_damaged_newest_one_is_passed_over_with_a_warning(tmp_path, every_checkpoint_written):
    """In one way, whoever comes upon it, and at the script's own line."""
    whole = wrapped()
    fitted(whole, tmp_path)
    with (tmp_path / "step-00000008" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    trainer = wrapped()
    for take_up in (trainer.restore, lockstep.load_arrays, lambda path: fitted(trainer, path)):
        with pytest.warns(
            UserWarning, match=r"A newer checkpoint was skipped. .*step-00000008.*model\.safetensors"
        ) as told:
            take_up(tmp_path)
        assert [each.filename for each in told] == [__file__]
    assert trainer.digest() == whole.digest()


def test_a_disk_that_cannot_be_written_to(tmp_path):
    folder = tmp_path / "ckpt"
    trainer = wrapped()
    fitted(trainer, folder, epochs=1)
    (tmp_path / "file").write_text("not a folder")
    before = trainer.digest()
    with pytest.raises(SaveError, match="file"):
        trainer.save(tmp_path / "file" / "below")
    assert trainer.digest() == before
    with pytest.raises(CheckpointError, match="Not a directory"):
        fitted(wrapped(), tmp_path / "file" / "below")


def test_fit_says_where_it_goes_on(tmp_path, capsys, every_checkpoint_written):
    trainer = wrapped()
    fitted(trainer, lockstep.Checkpoint(tmp_path, every=3), epochs=1)
    os.rename(tmp_path / "step-00000004", tmp_path / "kept")  # killed before the epoch was over
    trainer = wrapped()
    trainer.fit((x, y), epochs=1, batch_size=16, checkpoint=lockstep.Checkpoint(tmp_path, every=3))
    shown = capsys.readouterr().out
    line = rf"resumed from {re.escape(str(tmp_path))}/step-00000003 after 3 steps of epoch 1 \(at once, \d+\.\d s\)"
    assert re.search(line, shown)


def test_a_fit_that_fails_starts_nothing_anew():
    """A fit whose workers were lost and whose callback fails ends with that error, and starts no others for it."""

    class Killing(lockstep.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for pid in self.trainer.session.processes.pids:
                os.kill(pid, signal.SIGKILL)
            self.trainer.close()
            raise RuntimeError("broken")

    with wrapped(devices=2) as trainer:
        with pytest.raises(RuntimeError, match="broken"):
            fitted(trainer, callbacks=[Killing()])
        assert not trainer.session.has_processes


def test_a_fit_that_loses_all_workers_again_and_again_is_made_by_the_controller(capsys):
    """No step waits for those that are started instead, and in the end nobody is started in vain."""

    class Killing(lockstep.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for pid in self.trainer.session.processes.pids:
                os.kill(pid, signal.SIGKILL)

    with wrapped() as alone, wrapped(devices=2) as trainer:
        assert len(trainer.devices) == 2
        for each in (alone, trainer):
            fitted(each, callbacks=[] if each is alone else [Killing()])
        assert trainer.num_steps == alone.num_steps == 8
        assert trainer.digest() == alone.digest()
    assert "was killed by SIGKILL" in capsys.readouterr().err
