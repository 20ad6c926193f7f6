"""A run is killed, again and again, at any moment; it always goes on and ends with the same bits."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import lockstep

KILLS = 20
SCRIPT = """
import sys
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

class Led(lockstep.Callback):
    "Each step waits for a line on stdin; at its end nothing waits."

    def on_train_batch_begin(self, batch, logs=None):
        sys.stdin.readline()

    def on_train_batch_end(self, batch, logs=None):
        print("step", flush=True)

x = np.random.default_rng(0).normal(size=(640, 6))
trainer = lockstep.wrap(
    Dense([6, 64, 3], seed=1, dropout=0.2), SGD(0.05, momentum=0.9), "cross_entropy", devices=int(sys.argv[2]), shards=4
)
trainer.fit((x, np.arange(640) % 3), epochs=6, batch_size=16, verbose=0, callbacks=[Led(), lockstep.EMA(0.9)],
            checkpoint=lockstep.Checkpoint(sys.argv[1], every=1, keep=3))
print("digest", trainer.digest(), flush=True)
"""


def started(folder, devices):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(devices)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lead(process, steps):
    """Has the process make so many steps, and returns when they are made."""
    process.stdin.write("\n" * steps)
    process.stdin.flush()
    for _ in range(steps):
        assert process.stdout.readline() == "step\n"


def newest(folder):
    steps = [int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-")]
    return max(steps, default=0)


def finished(folder, devices):
    process = started(folder, devices)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return re.search("digest ([0-9a-f]{64})", out).group(1)


@pytest.mark.timeout(900)
def test_kill_9_at_random_moments(tmp_path):
    whole = finished(tmp_path / "whole", 1)
    folder = tmp_path / "killed"
    folder.mkdir()
    random.seed(7)
    reached = 0
    for kill in range(KILLS):
        process = started(folder, 1 + kill % 3)
        with process:
            lead(process, random.randint(1, 7))
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(random.uniform(0.0, 0.02))  # in the next step, while it is saved, or afterwards
            process.send_signal(signal.SIGKILL)
        step = newest(folder)
        assert step >= reached  # what was there is there
        reached = step
        if step:
            assert "0.weight" in lockstep.load_arrays(folder)  # and whole
    assert 0 < reached <= 8 * KILLS
    assert finished(folder, 2) == whole


def test_sigterm_saves_and_leaves_with_0(tmp_path):
    folder = tmp_path / "told"
    process = started(folder, 2)
    with process:
        lead(process, 9)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert process.returncode == 0
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+), saved in (?:.*)told; the same command continues", err)
    assert newest(folder) == int(step)
    assert "digest" not in out
    assert finished(folder, 3) == finished(tmp_path / "whole", 1)
