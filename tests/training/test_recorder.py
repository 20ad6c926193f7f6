"""`fit(report=, trace=)`: what it writes of a real run, and what it refuses."""

import json
import os
import re
import resource
import select
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.errors import ArgumentError, SaveError
from lockstep.training import step

X = np.random.default_rng(0).normal(size=(128, 6))
Y = np.arange(128) % 3


def wrap(devices=1):
    model = Dense([6, 8, 3], seed=1)
    return lockstep.wrap(model, SGD(0.3), "cross_entropy", metrics=["accuracy"], devices=devices, shards=6)


def fit(trainer, epochs=2, **options):
    return trainer.fit((X, Y), epochs=epochs, batch_size=32, **{"verbose": 0, **options})


class Kill(lockstep.Callback):
    """Kills a worker in a step, which it is stopped for."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_begin(self, batch, logs=None):
        if self.trainer.num_steps == self.step:
            processes = self.trainer.session.processes
            processes.ready()  # the step before is over in the workers too
            os.kill(processes.pids[0], signal.SIGSTOP)
            threading.Timer(0.1, os.kill, (processes.pids[0], signal.SIGKILL)).start()


def read_slices(path):
    """The number of the lane, the name, the step and the attempt of every slice."""
    events = json.loads(path.read_bytes())
    return {
        (event["tid"], event["name"], event["args"].get("step"), event["args"].get("attempt", 1))
        for event in events
        if event["ph"] == "X"
    }


def test_a_worker_that_is_killed_is_in_the_report_and_its_shards_are_in_other_lanes(tmp_path, capsys):
    report, trace = tmp_path / "run.html", tmp_path / "run.json"
    digests = []
    with wrap() as trainer:
        for _ in range(3):
            fit(trainer, 1)
            digests.append(trainer.digest())
    with wrap(3) as trainer:
        options = {"validation_data": (X, Y), "checkpoint": tmp_path / "ckpt", "callbacks": [Kill(5)]}
        fit(trainer, 3, report=report, trace=trace, **options)
        assert not trainer.session.processes.member.laps.timings
    slices = read_slices(trace)
    assert {(0, "shard 0", 4, 1), (1, "shard 2", 4, 1), (1, "shard 3", 4, 1), (2, "shard 5", 4, 1)} <= slices
    again = {lane for lane, name, step, number in slices if (name, step, number) == ("shard 2", 5, 2)}
    assert again
    assert 1 not in again
    assert {(1, "exchange", 4, 1), (1, "update", 4, 1), (0, "validation", 4, 1), (0, "checkpoint", 4, 1)} <= slices
    page = report.read_text()
    assert re.findall(r"<code>([0-9a-f]{64})</code>", page) == digests
    assert "cpu:1 was lost (step 5, " in page
    assert "was killed by SIGKILL" in page
    assert "was killed by SIGKILL" in capsys.readouterr().err
    assert "finished" in page
    assert "a checkpoint at step 3" in page


def test_a_worker_that_ends_between_two_steps_is_lost_too(tmp_path):
    class KillBetween(lockstep.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.trainer.num_steps == 5:
                processes = self.trainer.session.processes
                pid = processes.pids[0]
                os.kill(pid, signal.SIGKILL)
                ended = os.pidfd_open(pid)
                select.select([ended], [], [])
                os.close(ended)

    with wrap(2) as trainer:
        fit(trainer, report=tmp_path / "run.html", callbacks=[KillBetween()])
    page = (tmp_path / "run.html").read_text()
    assert "cpu:1 was lost (step 4, " in page
    assert "has left" not in page


@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_is_measured_if_nothing_is_asked_for(devices, monkeypatch):
    monkeypatch.setattr(step, "TimedFold", None)  # an error if it is used
    with wrap(devices) as trainer:
        assert len(trainer.devices) == devices
        fit(trainer)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_pass_for_gradients_is_no_step(devices, tmp_path):
    class Look(lockstep.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.trainer.gradients((X[:32], Y[:32]))

    with wrap(devices) as trainer:
        assert len(trainer.devices) == devices
        fit(trainer, report=tmp_path / "run.html", trace=tmp_path / "run.json", callbacks=[Look()])
    times = re.search(r'"steps":\s*\[([^]]*)\]', (tmp_path / "run.html").read_text())
    assert [int(count) for count in times[1].split(",")] == [1] * 8
    slices = read_slices(tmp_path / "run.json")
    assert {number for _, _, _, number in slices} == {1}
    passes = {(name, step) for _, name, step, _ in slices if name.startswith("shard 0")}
    assert passes == {(name, step) for name in ("shard 0", "shard 0 (gradients)") for step in range(8)}


def test_a_run_that_raises_leaves_a_report_that_says_so(tmp_path):
    class Fail(lockstep.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.trainer.num_steps == 3:
                raise ValueError("no <more> disk")

    with wrap() as trainer, pytest.raises(ValueError, match="no <more> disk"):
        fit(trainer, report=tmp_path / "run.html", trace=tmp_path / "run.json", callbacks=[Fail()])
    assert "ended: no &lt;more&gt; disk" in (tmp_path / "run.html").read_text()
    assert {step for _, _, step, _ in read_slices(tmp_path / "run.json")} >= {0, 1, 2}


@contextmanager
def full_disk():
    """A context with a function that makes the disk full: no file can have more bytes than it is given."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:  # before pytest writes to a file itself
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_files_and_not_the_run(tmp_path, capsys):
    class Fill(lockstep.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                fill((tmp_path / "run.json").stat().st_size + 10)

    with wrap() as trainer, full_disk() as fill:
        fit(trainer, 50, report=tmp_path / "run.html", trace=tmp_path / "run.json", callbacks=[Fill()])
        assert trainer.num_steps == 200
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split(" cannot be written any further: File too large. ")[0] for line in lines) == [
        str(tmp_path / "run.html"),
        str(tmp_path / "run.json"),
    ]
    assert {step for _, _, step, _ in read_slices(tmp_path / "run.json")} >= {0, 1, 2, 3}
    assert "epoch 1 has ended" in (tmp_path / "run.html").read_text()


def test_what_an_earlier_run_has_written_stays_if_a_callback_is_refused(tmp_path):
    class Refused(lockstep.Callback):
        def set_trainer(self, trainer):
            raise ValueError("not this model")

    (tmp_path / "run.json").write_text("earlier")
    with wrap() as trainer, pytest.raises(ValueError, match="not this model"):
        fit(trainer, trace=tmp_path / "run.json", callbacks=[Refused()])
    assert (tmp_path / "run.json").read_text() == "earlier"


@pytest.mark.parametrize("name", ["report", "trace"])
def test_a_path_that_cannot_be_written_is_refused_before_training(name, tmp_path):
    (tmp_path / "file").write_text("")
    with wrap() as trainer:
        history = fit(trainer)
        for path, error, message in (
            (3, ArgumentError, rf"{name} must be a path\. Got 3\. Use for example 'run\.(html|json)'\."),
            (tmp_path, ArgumentError, rf"{name} must name a file\. Got the folder '.*'\. Use '.*/run\.(html|json)'\."),
            (tmp_path / "file" / "x", SaveError, rf"{name}='.*/file/x' cannot be written: .*\. Use a path in a folder"),
        ):
            with pytest.raises(error, match=message):
                fit(trainer, **{name: path})
            assert trainer.history is history
            assert trainer.num_steps == 8
        fit(trainer, **{name: tmp_path / "new" / "folder" / "run"})  # which is made
