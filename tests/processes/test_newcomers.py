"""Workers that are started in the place of others: what they prove, and what is said of those that cannot."""

import os
import re
import signal
import sys
import time
import types

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense

GENERATOR = np.random.Generator(np.random.PCG64(4))
BATCH = GENERATOR.standard_normal((20, 6)), GENERATOR.integers(0, 3, 20)
SOURCE = """
import threading
from lockstep.backends.numpy import Dense

SCALE = 1.0
FAILS = 0

class Net(Dense):
    def forward(self, x, generator):
        if FAILS:
            error = ValueError("this process has no data")
            if FAILS == 20:
                error.lock = threading.Lock()  # which cannot be pickled
            raise error
        return super().forward(x * SCALE, generator)
"""


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """A module that every process imports by itself; its model reads a global of it."""
    (tmp_path / "scaled.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import scaled

    yield scaled
    del sys.modules["scaled"]


def wrap(model, devices):
    return lockstep.wrap(model, SGD(0.1, momentum=0.9), "cross_entropy", devices=devices, shards=6)


def train_until(trainer, alone, is_done, most=400):
    """Makes steps on both until `is_done()`; the digests stay equal."""
    for _ in range(most):
        for each in (trainer, alone):
            each.step(BATCH, verbose=0)
        assert trainer.digest() == alone.digest()
        if is_done():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


def test_a_replacement_joins_when_it_has_proved_its_bits(capsys, monkeypatch):
    with (
        wrap(Dense([6, 8, 3], seed=1, dropout=0.2), 3) as trainer,
        wrap(Dense([6, 8, 3], seed=1, dropout=0.2), 1) as alone,
    ):
        assert len(trainer.devices) == 3
        train_until(trainer, alone, lambda: True)
        first, second = trainer.session.processes.pids
        calls = []
        record(monkeypatch, trainer, "step", calls)
        for name in ("controls", "partial_sums"):
            record(monkeypatch, trainer.session.backend, name, calls)
        os.kill(first, signal.SIGKILL)
        train_until(trainer, alone, lambda: len(trainer.session.processes.pids) == 2 and not is_member(trainer, first))
        third = trainer.session.processes.pids[0]
        assert trainer.session.processes.pids == [third, second]
        train_until(trainer, alone, lambda: True)
    steps = [step.split() for step in " ".join(calls).split("step")]
    twice = [step for step in steps if step.count("partial_sums") == 2]  # for a proof, or after a death
    assert twice
    assert all(step[0] == "controls" for step in twice)  # what the script has changed is found before a pass
    ended, joined = capsys.readouterr().err.splitlines()
    assert re.match(rf"cpu:1 \(pid {first}\) was killed by SIGKILL.* step \d+; its shards go to cpu:0 and cpu:2", ended)
    assert re.fullmatch(rf"cpu:1 \(pid {third}\) takes part from step \d+ on", joined)


def record(monkeypatch, owner, name, calls):
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: calls.append(name) or function(*given, **named))


def is_member(trainer, pid):
    return pid in trainer.session.processes.pids


@pytest.mark.parametrize(
    "name, value, why",
    [
        (
            "SCALE",
            20.0,  # of another length, because an import looks at the size and at the second of the last change
            "computed other bits for one shard than this process, so it takes no part. Look for what differs between "
            "the two: values that the model or the loss has in globals, attributes or closures",
        ),
        ("FAILS", 10, "could not compute a shard: this process has no data"),
        ("FAILS", 20, "could not compute a shard: Worker cpu:1 raised ValueError: this process has no data"),
    ],
    ids=["other bits", "raises", "raises what cannot be sent"],
)
def test_a_replacement_whose_proof_fails_takes_no_part(scaled, tmp_path, capsys, name, value, why):
    """The script's module says one thing, the one that the new process imports another."""
    with wrap(scaled.Net([6, 8, 3], seed=1), 2) as trainer, wrap(Dense([6, 8, 3], seed=1), 1) as alone:
        assert len(trainer.devices) == 2
        train_until(trainer, alone, lambda: True)
        (tmp_path / "scaled.py").write_text(SOURCE.replace(f"{name} = {getattr(scaled, name)}", f"{name} = {value}"))
        lines = []
        os.kill(trainer.session.processes.pids[0], signal.SIGKILL)

        def is_left_out():
            lines.extend(capsys.readouterr().err.splitlines())
            return any("is left out" in line for line in lines)

        train_until(trainer, alone, is_left_out)
        assert trainer.session.processes.pids == []
        train_until(trainer, alone, lambda: True)
    refused = [line for line in lines if line.endswith(why)]
    assert len(refused) == 2  # with the first that was killed, three of its processes have ended
    assert all(re.match(r"cpu:1 \(pid \d+\) ", line) for line in refused)
    assert not any("takes part" in line for line in lines)


def test_a_replacement_that_cannot_start_is_said_and_does_not_stop_the_run(capsys):
    ghost = types.ModuleType("ghost")
    exec("from lockstep.backends.numpy import Dense\nclass Net(Dense): pass", ghost.__dict__)
    plain = Dense([6, 8, 3], seed=1)
    with wrap(plain, 2) as trainer, wrap(Dense([6, 8, 3], seed=1), 1) as alone:
        assert len(trainer.devices) == 2
        train_until(trainer, alone, lambda: True)
        sys.modules["ghost"] = ghost
        try:
            plain.__class__ = ghost.Net  # importable in this process alone
            os.kill(trainer.session.processes.pids[0], signal.SIGKILL)
            lines = []

            def is_left_out():
                lines.extend(capsys.readouterr().err.splitlines())
                return any("is left out" in line for line in lines)

            train_until(trainer, alone, is_left_out)
        finally:
            del sys.modules["ghost"]
    assert any(re.match(r"cpu:1 \(pid \d+\) could not start: A worker cannot import 'ghost'", line) for line in lines)
