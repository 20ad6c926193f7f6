"""What `fit` and `step` begin with: their numbers, the opening line, the checkpoint before the first step."""

import os
import re
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.checkpoint import Writer, read, write
from lockstep.errors import ArgumentError, BatchError, CallbackError, CheckpointError, ExactError

X = np.random.default_rng(0).normal(size=(128, 6))
Y = np.arange(128) % 3


def wrapped(lr=0.3, **options):
    options = {"shards": 4, **options}
    return lockstep.wrap(Dense([6, 8, 3], seed=1, dropout=0.2), SGD(lr, momentum=0.9), "cross_entropy", **options)


def fitted(trainer, folder=None, epochs=2, **options):
    return trainer.fit((X, Y), epochs=epochs, batch_size=32, checkpoint=folder, verbose=0, **options)


def digest(**options):
    with wrapped(**options) as trainer:
        fitted(trainer)
        return trainer.digest()


# -- the numbers, looked at before anything is changed


@pytest.mark.parametrize(
    ("use", "arguments", "error", "message"),
    [
        ("fit", {"batch_size": 1.5}, ArgumentError, "batch_size must be an integer, 1 or more. Got batch_size=1.5."),
        ("fit", {"batch_size": 32.0}, ArgumentError, "Got batch_size=32.0. Use batch_size=32, for example."),
        ("fit", {"batch_size": "32"}, ArgumentError, "Got batch_size='32'. Use batch_size=1, for example."),
        ("fit", {"batch_size": True}, ArgumentError, "Got batch_size=True."),
        ("fit", {"batch_size": 0}, BatchError, "Got batch_size=0. Use batch_size=1, for example."),
        ("fit", {"batch_size": float("nan")}, ArgumentError, "Got batch_size=nan. Use batch_size=1, for example."),
        ("fit", {"epochs": 2.0}, ArgumentError, "epochs must be an integer, 0 or more. Got epochs=2.0. Use epochs=2"),
        ("fit", {"epochs": -1}, BatchError, "Got epochs=-1. Use epochs=1, for example."),
        ("fit", {"epochs": None}, ArgumentError, "Got epochs=None."),
        (
            "fit",
            {"steps_per_epoch": 0},
            BatchError,
            "steps_per_epoch must be an integer, 1 or more. Got steps_per_epoch=0.",
        ),
        ("fit", {"steps_per_epoch": "all"}, ArgumentError, "Got steps_per_epoch='all'."),
        ("fit", {"callbacks": [3]}, CallbackError, "callbacks[0] is 3, not a lockstep.Callback."),
        (
            "fit",
            {"validation_data": (X, Y[:5])},
            BatchError,
            "The arrays of a batch have different lengths, 128, 5, in",
        ),
        ("evaluate", {"batch_size": -4}, BatchError, "Got batch_size=-4."),
        ("evaluate", {"batch_size": 2.5}, ArgumentError, "Got batch_size=2.5. Use batch_size=2, for example."),
    ],
)
def test_a_wrong_number_is_refused_and_changes_nothing(use, arguments, error, message):
    with wrapped(devices=1) as trainer:
        history = fitted(trainer)
        before, opening = trainer.digest(), trainer.opening
        with pytest.raises(error) as caught:
            getattr(trainer, use)((X, Y), **arguments)
        assert message in str(caught.value)
        assert trainer.digest() == before
        assert trainer.history is history
        assert trainer.opening == opening
        assert trainer.evaluate((X, Y)) == trainer.evaluate((X, Y), batch_size=32)  # as large as the last training's


def test_numpys_integers_are_numbers():
    with wrapped() as one, wrapped() as other:
        fitted(one, epochs=np.int64(2))
        other.fit((X, Y), epochs=2, batch_size=np.int32(32), steps_per_epoch=np.uint8(4), verbose=0)
        assert one.digest() == other.digest()
        assert one.predict(X, batch_size=np.int64(7)).shape == (128, 3)


def test_without_a_size_fit_has_batches_of_32_also_after_others():
    with wrapped() as trainer:
        fitted(trainer, epochs=1)
        trainer.fit((X, Y), batch_size=128, verbose=0)
        trainer.fit((X, Y), verbose=0)
        assert trainer.num_steps == 4 + 1 + 4


# -- the opening line


def test_every_fit_opens_with_its_own_batch(capsys):
    with wrapped(devices=1) as trainer:
        for size in (64, 128, 16):
            trainer.fit((X, Y), batch_size=size)
            opening = f"1 device (cpu:0), 4 shards of {size // 4}, batch {size}, 1 thread per shard, seed 0"
            assert capsys.readouterr().out.splitlines()[0] == trainer.opening == opening


def test_the_first_step_prints_the_opening_once(capsys):
    with wrapped(devices=2) as trainer:
        trainer.step((X, Y))
        trainer.step((X[:9], Y[:9]))
        opening = "2 devices (cpu:0, cpu:1), 4 shards of 32, batch 128, 1 thread per shard, seed 0\n"
        assert capsys.readouterr().out == opening
        fitted(trainer)
        trainer.step((X, Y))
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("quiet", [lambda trainer: trainer.step((X, Y), verbose=0), fitted])
def test_a_quiet_beginning_stays_quiet(capsys, quiet):
    with wrapped() as trainer:
        quiet(trainer)
        trainer.step((X, Y))
        assert trainer.verify((X, Y), steps=1, devices=(1, 2)).equal
        assert capsys.readouterr().out == ""


def test_a_steps_verbose_is_fits():
    with wrapped() as trainer:
        with pytest.raises(CallbackError, match="Got verbose=3"):
            trainer.step((X, Y), verbose=3)
        assert trainer.num_steps == 0


# -- where a run begins


class Kill(lockstep.Callback):
    """Kills a worker at this step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.num_steps == self.step:
            os.kill(self.trainer.session.processes.pids[0], signal.SIGKILL)


class Break(lockstep.Callback):
    """Fails at this step, once."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.num_steps == self.step:
            self.step = None
            raise RuntimeError("broken")


def broken(trainer, folder, step=3, **options):
    with pytest.raises(RuntimeError, match="broken"):
        fitted(trainer, folder, callbacks=[Break(step)], **options)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_worker_lost_before_the_first_checkpoint_costs_nothing(tmp_path, devices, capsys):
    with wrapped(devices=devices) as trainer:
        assert len(trainer.devices) == devices
        history = fitted(trainer, tmp_path, callbacks=[Kill(3)])
        assert (trainer.num_steps, history.epoch) == (8, [0, 1])
        assert trainer.digest() == digest(devices=1)
    assert re.search(
        r"^cpu:1 \(pid \d+\) was killed by SIGKILL.* (in|after) step [23]; its shards go to ", capsys.readouterr().err
    )


def test_the_beginning_is_where_the_trainer_stands(tmp_path):
    with wrapped() as trainer, wrapped() as undisturbed:
        for each in (trainer, undisturbed):
            fitted(each)
            each.step((X, Y))
        broken(trainer, tmp_path, step=11)
        assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000009"]
        fitted(trainer, tmp_path)
        fitted(undisturbed)
        assert trainer.resumed == f"resumed from {tmp_path}/step-00000009 at the beginning of epoch 1"
        assert trainer.digest() == undisturbed.digest()
        assert trainer.num_steps == undisturbed.num_steps == 17


def test_another_process_starts_anew_from_a_beginning_with_what_its_script_says(tmp_path):
    """Nothing was trained there: a smaller rate, given after an early failure, counts."""
    with wrapped() as trainer:
        broken(trainer, tmp_path)
    with wrapped(lr=0.01) as other, wrapped(lr=0.01) as plain:
        fitted(other, tmp_path)
        fitted(plain)
        assert other.resumed == ""
        assert other.digest() == plain.digest()


def test_a_generator_may_be_given_again_where_nothing_was_trained(tmp_path):
    def batches():
        return ((X[i : i + 32], Y[i : i + 32]) for i in range(0, 128, 32))

    with wrapped() as trainer:
        with pytest.raises(RuntimeError, match="broken"):
            trainer.fit(batches(), callbacks=[Break(2)], checkpoint=tmp_path, verbose=0)
        with pytest.raises(ExactError, match="This data is a generator, which cannot be read from the batch"):
            trainer.fit(batches(), checkpoint=tmp_path, verbose=0)
    with wrapped() as other, wrapped() as plain:
        other.fit(batches(), checkpoint=tmp_path, verbose=0)
        plain.fit(batches(), verbose=0)
        assert other.digest() == plain.digest()


def test_the_shards_of_a_beginning_are_kept(tmp_path):
    """Ten devices have raised them; the same command on one device makes the same bits."""
    with wrapped(shards=None) as trainer:
        trainer.session.run.shards = 16  # as with more devices than the batch alone gives shards
        broken(trainer, tmp_path)
    assert read(tmp_path / "step-00000000").facts["shards"] == 16
    with wrapped(shards=None) as other:
        fitted(other, tmp_path)
        assert other.digest() == digest(shards=16)
    with wrapped(shards=None) as trainer:
        broken(trainer, tmp_path / "other")
    with wrapped(shards=None) as other:  # another batch size is another run
        other.fit((X, Y), batch_size=128, checkpoint=tmp_path / "other", verbose=0)
        assert other.session.run.shards == 2


def test_the_beginning_is_a_checkpoint_like_the_others(tmp_path):
    with wrapped() as trainer:
        fitted(trainer, lockstep.Checkpoint(tmp_path, keep=1, best="loss"))
    assert "step-00000000" not in os.listdir(tmp_path)
    with wrapped() as trainer:
        broken(trainer, lockstep.Checkpoint(tmp_path / "two", best="loss"))
        assert sorted(os.listdir(tmp_path / "two")) == [".lock", "step-00000000"]  # which is no best one


def test_a_folder_with_a_run_gets_no_other_beginning(tmp_path, monkeypatch):
    submit = Writer.submit  # steps wait for the writer: a newer checkpoint takes the place of one that waits
    monkeypatch.setattr(Writer, "submit", lambda self, job, keep=False: (submit(self, job, keep), self.wait()))
    with wrapped() as trainer:
        fitted(trainer, lockstep.Checkpoint(tmp_path, keep=None), epochs=1)
    with wrapped() as trainer:
        fitted(trainer, lockstep.Checkpoint(tmp_path, keep=None))
        assert trainer.digest() == digest()
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000000", "step-00000004", "step-00000008"]


# -- seeds


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**100])
def test_any_integer_is_a_seed(tmp_path, seed):
    with wrapped(seed=seed, devices=1) as trainer:
        fitted(trainer, tmp_path, epochs=1)
        assert trainer.opening.endswith(f"seed {seed}")
    with wrapped(devices=2) as resumed, wrapped(seed=seed, devices=1) as plain:
        fitted(resumed, tmp_path)
        fitted(plain)
        assert resumed.session.run.seed == seed
        assert resumed.digest() == plain.digest() != digest()


@pytest.mark.parametrize("forged", [{"threads": -3}, {"shards": True}, {"shards": 5_000_000}])
def test_the_numbers_of_a_forged_beginning_are_refused(tmp_path, forged):
    with lockstep.wrap(Dense([6, 3], seed=1), SGD(0.1), "cross_entropy") as trainer:
        broken(trainer, tmp_path, step=1)
    (folder,) = tmp_path.glob("step-*")
    saved = read(folder)
    shutil.rmtree(folder)
    write(folder, replace(saved, facts={**saved.facts, **forged}))
    with lockstep.wrap(Dense([6, 3], seed=1), SGD(0.1), "cross_entropy") as other:
        with pytest.raises(CheckpointError, match="The checkpoint or backup cannot be read"):
            fitted(other, tmp_path)
        assert other.session.run.shards is None


# -- SIGTERM, as all processes agree


def test_a_signal_that_comes_while_the_processes_agree_is_answered_at_the_next_step(tmp_path, monkeypatch):
    with wrapped() as trainer:
        agree = trainer.session.processes.agree
        signals = [signal.SIGTERM]

        def agree_slowly(stop, asked):
            if signals:
                signal.raise_signal(signals.pop())
            return agree(stop, asked)

        monkeypatch.setattr(trainer.session.processes, "agree", agree_slowly)
        with pytest.raises(SystemExit) as left:
            fitted(trainer, tmp_path)
        assert left.value.code == 0
        assert trainer.num_steps == 2  # at the first the others were not told


def test_a_signal_that_comes_during_the_last_save_is_answered(tmp_path, monkeypatch):
    with wrapped() as trainer:
        save = Writer.submit
        monkeypatch.setattr(Writer, "submit", lambda *args: (signal.raise_signal(signal.SIGTERM), save(*args)))
        with pytest.raises(SystemExit) as left:
            fitted(trainer, tmp_path, epochs=1)
        assert left.value.code == 0
