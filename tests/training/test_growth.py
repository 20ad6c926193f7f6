"""A run that starts alone gets more CPU replicas while it trains, and none of its bits changes."""

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.core import growth
from lockstep.errors import DeviceError, PlanError
from lockstep.launch.host import Host
from lockstep.training import session_processes
from lockstep.training.recorder import Recorder

GENERATOR = np.random.Generator(np.random.PCG64(7))
BATCH = GENERATOR.standard_normal((24, 6)), GENERATOR.integers(0, 3, 24)


@pytest.fixture
def host(monkeypatch):
    """Four free cores, and growth after the first step."""
    monkeypatch.setattr(sys.modules["lockstep.wrap"], "read_host", lambda: Host(4.0, 64 << 30, 1 << 20))
    monkeypatch.setattr(growth, "SECONDS_ALONE", 0.0)
    monkeypatch.setattr(growth, "MIN_STEP", 0.0)
    monkeypatch.setattr(growth, "_SECONDS_COMPARED", 1e9)  # replicas stay, whether they gain or not
    monkeypatch.delenv("LOCKSTEP_DEVICES", raising=False)


def wrap(devices=None, model=None, **options):
    model = model or Dense([6, 8, 3], seed=1, dropout=0.2)
    return lockstep.wrap(
        model, SGD(0.1, momentum=0.9), "cross_entropy", devices=devices, **{"shards": 6, "threads": 1, **options}
    )


def expected(num_steps):
    with wrap(1) as trainer:
        for _ in range(num_steps):
            trainer.step(BATCH, verbose=0)
        return trainer.digest()


def step_until(trainer, num_members, seconds=60.0):
    """Trains until so many processes take part; returns the number of steps."""
    end = time.monotonic() + seconds
    while len(trainer.session.processes.replicas()) != num_members:
        assert time.monotonic() < end, f"{len(trainer.session.processes.replicas())} of {num_members} members"
        trainer.step(BATCH, verbose=0)
    trainer.step(BATCH, verbose=0)
    return trainer.num_steps


@pytest.mark.timeout(120)
def test_a_run_grows_to_what_the_host_has_room_for(host, capsys):
    with wrap() as trainer:
        assert trainer.devices == ("cpu:0",)
        steps = step_until(trainer, 4)
        assert trainer.devices == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
        assert trainer.digest() == expected(steps)
        assert trainer.history.devices == trainer.devices
    assert capsys.readouterr().err.count("takes part from step") == 3


@pytest.mark.parametrize(
    ("options", "variable"), [({"devices": 1}, None), ({}, "1"), ({"shards": 1}, None), ({"threads": 4}, None)]
)
def test_a_run_that_does_not_grow(host, monkeypatch, options, variable):
    if variable:
        monkeypatch.setenv("LOCKSTEP_DEVICES", variable)
    with wrap(**options) as trainer:
        for _ in range(5):
            trainer.step(BATCH, verbose=0)
        assert trainer.devices == ("cpu:0",)
        assert threading.active_count() == 1


def test_devices_from_the_environment(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_DEVICES", "2")
    with wrap() as trainer, wrap(3) as given:
        assert (len(trainer.devices), len(given.devices)) == (2, 3)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "abc",
            DeviceError,
            "LOCKSTEP_DEVICES=abc is used as devices=['abc']. This host has no device 'abc:0'. Use one of its devices: "
            "cpu:0. Change LOCKSTEP_DEVICES, or unset it to use the default.",
        ),
        ("cpu:0, x:1", DeviceError, "LOCKSTEP_DEVICES=cpu:0,x:1 is used as devices=['cpu:0', 'x:1']. All devices must"),
        ("7", PlanError, "LOCKSTEP_DEVICES=7 is used as devices=7. devices=7 needs at least 7 shards, got shards=6."),
        ("-1", DeviceError, "LOCKSTEP_DEVICES must be a number of devices, 1 or more,"),
    ],
)
def test_devices_from_the_environment_that_do_not_fit(monkeypatch, text, error, message):
    monkeypatch.setenv("LOCKSTEP_DEVICES", text)
    with pytest.raises(error, match="^" + re.escape(message)):
        wrap()
    wrap(1).close()  # an argument has precedence


def test_devices_that_do_not_fit_and_are_not_from_the_environment(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_DEVICES", "abc")
    with pytest.raises(DeviceError, match=r"^This host has no device 'x:0'"):
        wrap("x")


class Unpicklable(Dense):
    """A model that cannot be sent to a worker."""

    def __init__(self):
        super().__init__([6, 8, 3], seed=1, dropout=0.2)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_pickled_stays_alone_and_says_so(host, capsys):
    with wrap(model=Unpicklable()) as trainer:
        for _ in range(3):
            trainer.step(BATCH, verbose=0)
        assert trainer.devices == ("cpu:0",)
        assert trainer.digest() == expected(3)
    assert capsys.readouterr().err.startswith("training stays on cpu:0: ")


@pytest.mark.timeout(120)
def test_a_batch_that_cannot_be_sent_ends_the_workers_that_nobody_asked_for(host, capsys):
    extra = [1.0] * 23
    with wrap() as trainer:
        steps = step_until(trainer, 4)
        trainer.step((*BATCH, np.ones(24)), verbose=0)
        trainer.step((*BATCH, [*extra, Weight(1.0)]), verbose=0)
        assert trainer.devices == ("cpu:0",)
        assert trainer.num_steps == steps + 2
    assert "training goes on with cpu:0 alone" in capsys.readouterr().err


class Weight(float):
    """A number that cannot be pickled."""

    def __reduce_ex__(self, protocol):
        raise TypeError("not picklable")


@pytest.mark.timeout(120)
def test_resize_up_and_down(capsys):
    with wrap(1) as trainer:
        trainer.step(BATCH, verbose=0)
        trainer.resize(3)
        assert step_until(trainer, 3) > 1
        trainer.resize(2)
        trainer.step(BATCH, verbose=0)
        assert len(trainer.session.processes.replicas()) == 2
        trainer.resize(1)
        trainer.step(BATCH, verbose=0)
        assert len(trainer.session.processes.replicas()) == 1
        trainer.close()  # a later use starts as many as were chosen last
        trainer.step(BATCH, verbose=0)
        assert trainer.devices == ("cpu:0",)
        assert trainer.digest() == expected(trainer.num_steps)


def test_resize_refuses_what_wrap_refuses():
    with wrap(2) as trainer:
        with pytest.raises(lockstep.errors.PlanError, match=r"devices=7 needs at least 7 shards, got shards=6"):
            trainer.resize(7)
        with pytest.raises(lockstep.errors.DeviceError, match="devices=0 leaves no device"):
            trainer.resize(0)
        assert len(trainer.devices) == 2


@pytest.mark.timeout(120)
def test_the_first_device_cannot_change():
    with (
        wrap(1) as trainer,
        pytest.raises(lockstep.errors.DeviceError, match=r"Got cpu:4 as the first device\. Put cpu:0"),
    ):
        trainer.resize(["cpu:4", "cpu:0"])


@pytest.mark.timeout(120)
def test_resize_to_more_devices_than_there_were_seats():
    with wrap(1, shards=20) as trainer:
        trainer.step(BATCH, verbose=0)
        trainer.resize(18)
        assert len(trainer.devices) == 18
        steps = step_until(trainer, 18)
        digest = trainer.digest()
    with wrap(1, shards=20) as alone:
        for _ in range(steps):
            alone.step(BATCH, verbose=0)
        assert alone.digest() == digest


@pytest.mark.timeout(120)
def test_a_batch_that_cannot_be_sent_while_newcomers_wait(host, monkeypatch, capsys):
    """Alone it works, so a run that nobody asked to grow must go on with it."""
    monkeypatch.setattr(growth, "_SECONDS_COMPARED", 0.0)
    monkeypatch.setattr(growth, "_KEPT", 0.0)
    with wrap() as trainer:
        for _ in range(400):
            trainer.step((*BATCH, [1.0] * 23 + [Weight(1.0)]), verbose=0)
            if trainer.devices == ("cpu:0",) and trainer.num_steps > 5:
                break
            time.sleep(0.01)
        assert trainer.devices == ("cpu:0",)
        assert "alone: a worker could not take part" in capsys.readouterr().err
        for _ in range(120):
            trainer.step(BATCH, verbose=0)
        assert capsys.readouterr().err == ""  # said once, and not compared with itself
        trainer.close()  # the next use does not start the workers again
        trainer.step(BATCH, verbose=0)
        assert trainer.devices == ("cpu:0",)


@pytest.mark.timeout(120)
def test_a_grown_run_loads_a_checkpoint_of_fewer_shards(host, tmp_path):
    with wrap(1, shards=2) as small:
        small.step(BATCH, verbose=0)
        small.save(tmp_path)
        digest = small.digest()
    with wrap(shards=None) as trainer:
        trainer.session.run.shards = 6
        step_until(trainer, 4)
        trainer.restore(tmp_path)
        assert len(trainer.devices) <= 2
        assert trainer.digest() == digest


@pytest.mark.timeout(120)
def test_a_grown_run_continues_a_run_of_fewer_shards_that_other_code_has_restored(host):
    with wrap(shards=None) as trainer:
        session = trainer.session
        session.run.shards = 6
        step_until(trainer, 4)
        assert session.min_shards == 1
        session.run.shards = 2
        session.continue_run()
        assert trainer.devices == trainer.history.devices == ("cpu:0", "cpu:1")
        trainer.step(BATCH, verbose=0)
        assert len(trainer.digest()) == 64


def test_devices_that_were_asked_for_need_a_shard_each(host):
    with wrap(2) as trainer:
        assert trainer.session.min_shards == 2


@pytest.mark.timeout(120)
def test_a_breakdown_of_a_run_that_shrinks(capsys):
    class Shrink(lockstep.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:  # after an epoch whose times were taken
                self.trainer.resize(1)

    data = (np.concatenate([BATCH[0]] * 4), np.concatenate([BATCH[1]] * 4))
    with wrap(2) as trainer:
        trainer.fit(data, epochs=3, batch_size=24, callbacks=[Shrink()], verbose=2)
        assert list(trainer.breakdown.devices) == ["cpu:0", "cpu:1"]


def test_verify_refuses_a_number_of_devices_of_which_one_was_lost(monkeypatch):
    from lockstep.training import verify as module

    digests = module.Session.digests

    def kill_and_digest(session):
        found = digests(session)
        for pid in getattr(session.processes, "pids", ()):
            os.kill(pid, signal.SIGKILL)
        return found

    with wrap(1) as trainer:
        monkeypatch.setattr(module.Session, "digests", kill_and_digest)
        with pytest.raises(lockstep.errors.WorkerError, match="A worker was lost, so that fewer than 2 devices"):
            trainer.verify(BATCH, steps=3, devices=(1, 2), batch_size=24)


class Count:
    """Counts the examples that it gets."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.number = 0

    def update(self, outputs, targets):
        self.number += len(targets)

    def compute(self):
        return float(self.number)


@pytest.mark.timeout(120)
def test_metric_objects_while_workers_join_and_end(capsys):
    """Each batch counts once, whoever has joined; what ends with a worker is said."""
    with wrap(2, metrics={"count": Count()}) as trainer:
        for _ in range(3):
            assert trainer.step(BATCH, verbose=0)["count"] == 24.0
        (pid,) = trainer.session.processes.pids
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while not trainer.session.processes.pids or pid in trainer.session.processes.pids:
            assert time.monotonic() < end
            assert trainer.step(BATCH, verbose=0)["count"] == 24.0
        for _ in range(3):
            assert trainer.step(BATCH, verbose=0)["count"] == 24.0


def test_outputs_that_are_lost_with_a_worker_are_said(monkeypatch, capsys):
    with wrap(2, metrics={"count": Count()}) as trainer:
        assert trainer.step(BATCH, verbose=0)["count"] == 24.0
        session = trainer.session
        step = session.step

        def step_and_kill(batch):
            outcome = step(batch)
            for pid in session.processes.pids:
                os.kill(pid, signal.SIGKILL)
            return outcome

        monkeypatch.setattr(session, "step", step_and_kill)
        assert trainer.step(BATCH, verbose=0)["count"] in (12.0, 24.0)
    assert "The metric objects lack the outputs of shard 3, 4, 5 of a batch" in capsys.readouterr().err


def test_resize_in_a_callback():
    class Resize(lockstep.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.trainer.num_steps in (3, 6):
                self.trainer.resize(2 if self.trainer.num_steps == 3 else 1)

    data = (np.concatenate([BATCH[0]] * 8), np.concatenate([BATCH[1]] * 8))
    digests = set()
    for callbacks in ([], [Resize()]):
        with wrap(1) as trainer:
            trainer.fit(data, epochs=2, batch_size=24, callbacks=callbacks, verbose=0)
            digests.add(trainer.digest())
    assert len(digests) == 1


def test_a_growth_plan_waits_for_seconds_and_for_steps_that_are_long_enough():
    rule = growth.GrowthRule()
    assert not any(rule.add_step(0.001) for _ in range(5000))  # steps of 1 ms gain nothing
    rule = growth.GrowthRule()
    due = [rule.add_step(0.01) for _ in range(300)]
    assert due.index(True) in (199, 200)
    assert session_processes.GrowthPlan(lambda: Host(1, 1, 1), print).rule is not rule


def test_replicas_are_kept_if_steps_are_faster():
    for grown, expected in ((0.004, True), (0.0098, False), (0.02, False)):
        rule = growth.GrowthRule()
        for _ in range(60):
            rule.add_step(0.01)
        found = [rule.add_grown_step(grown) for _ in range(200)]
        assert found[:70] == [None] * 70
        assert found[-1] is expected


@pytest.mark.timeout(120)
def test_replicas_that_gain_nothing_end(host, monkeypatch, capsys):
    monkeypatch.setattr(growth, "_SECONDS_COMPARED", 0.0)
    monkeypatch.setattr(growth, "_KEPT", 0.0)
    with wrap() as trainer:
        step_until(trainer, 4)
        end = time.monotonic() + 60
        while trainer.devices != ("cpu:0",):
            assert time.monotonic() < end
            trainer.step(BATCH, verbose=0)
        steps = [trainer.step(BATCH, verbose=0) for _ in range(3)]
        assert len(steps) == 3
        assert trainer.digest() == expected(trainer.num_steps)
        assert trainer.history.devices == ("cpu:0",)
    assert "training goes on with cpu:0 alone: a step took" in capsys.readouterr().err


def test_every_step_of_a_run_that_grows_is_observed(host, monkeypatch, tmp_path):
    steps = []
    add_attempt = Recorder.add_attempt
    monkeypatch.setattr(
        Recorder, "add_attempt", lambda self, attempt: steps.append(attempt.step) or add_attempt(self, attempt)
    )
    data = np.concatenate([BATCH[0]] * 8), np.concatenate([BATCH[1]] * 8)
    with wrap() as trainer:
        trainer.fit(data, batch_size=24, verbose=0, trace=tmp_path / "run.json")
        assert len(trainer.devices) == 4
    assert sorted(set(steps)) == [*range(8)]


def test_metric_objects_get_every_batch_when_replicas_end(host, monkeypatch, capsys):
    monkeypatch.setattr(growth, "_SECONDS_COMPARED", 0.0)
    monkeypatch.setattr(growth, "_KEPT", 0.0)
    with wrap(metrics={"count": Count()}) as trainer:
        has_grown, end = False, time.monotonic() + 60
        while not has_grown or len(trainer.devices) > 1:
            assert time.monotonic() < end
            assert trainer.step(BATCH, verbose=0)["count"] == 24.0
            has_grown = has_grown or len(trainer.session.processes.replicas()) == 4
        assert trainer.step(BATCH, verbose=0)["count"] == 24.0
    assert "lack the outputs" not in capsys.readouterr().err
