"""A launched process that is killed, stopped or late: the others say which one it is, and none of them hangs."""

import os
import signal
import threading
import time

import pytest

from integration.run_script import free_port, together

pytestmark = pytest.mark.timeout(120)

COUNT = 3
LOST = 1

SCRIPT = """
import os, time
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

x, y = np.eye(48, dtype="float32"), np.arange(48) % 4
time.sleep(float(os.environ.get("LATE", 0)))
trainer = lockstep.wrap(Dense([48, 40, 4], seed=1, dtype="float32"), SGD(0.1), "cross_entropy", shards=8)
print("ready", flush=True)
try:
    while True:
        trainer.step((x, y))
        print("step", flush=True)
finally:
    print(f"ended {time.monotonic()}", flush=True)
"""


def variables(**more):
    port = str(free_port())
    return [
        {
            "RANK": str(index),
            "WORLD_SIZE": str(COUNT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(COUNT),
            **more,
            "LATE": "2" if index == LOST else "0",  # so a late process is waited for in each of these worlds
        }
        for index in range(COUNT)
    ]


class Reader:
    """Reads a stream in the background, so that a process never waits for its output to be read."""

    def __init__(self, stream):
        self.lines = []
        self._thread = threading.Thread(target=self._read, args=(stream,))
        self._thread.start()

    def _read(self, stream):
        for line in stream:
            self.lines.append(line.rstrip())

    def wait_for(self, text, seconds):
        deadline = time.monotonic() + seconds
        while not any(text in line for line in list(self.lines)):
            assert time.monotonic() < deadline, self.lines[-20:]
            time.sleep(0.02)

    def join(self):
        self._thread.join()


def watch(scripts):
    """Readers of what each process prints, and of its errors, once all make steps."""
    outputs = [Reader(script.process.stdout) for script in scripts]
    errors = [Reader(script.process.stderr) for script in scripts]
    for output in outputs:
        output.wait_for("step", 60)
    return outputs, errors


def check_ends(scripts, outputs, errors, what, since, seconds):
    """Asserts that all but the lost process end in time, each with one line that names it."""
    host = os.uname().nodename
    for index, script in enumerate(scripts):
        if index == LOST:
            continue
        assert script.process.wait(timeout=60) == 1
        errors[index].join()
        outputs[index].join()
        assert f"lockstep.errors.WorkerError: Process {LOST} on {host} has {what}" in errors[index].lines[-1]
        assert float(outputs[index].lines[-1].split()[1]) - since < seconds


def test_a_stopped_process_is_named_and_waited_for_and_a_killed_one_ends_the_others(tmp_path):
    with together(SCRIPT, tmp_path, variables()) as scripts:
        outputs, errors = watch(scripts)
        scripts[LOST].process.send_signal(signal.SIGSTOP)
        for index in {0, 1, 2} - {LOST}:
            errors[index].wait_for(f"process {index} has waited 5 s for process {LOST} on ", 15)
        scripts[LOST].process.send_signal(signal.SIGCONT)
        before = [len(output.lines) for output in outputs]
        deadline = time.monotonic() + 20
        while any(len(output.lines) < count + 5 for output, count in zip(outputs, before, strict=True)):
            assert time.monotonic() < deadline  # the steps go on
            time.sleep(0.02)
        killed = time.monotonic()
        scripts[LOST].process.kill()
        check_ends(scripts, outputs, errors, "ended, and every process is needed", killed, 2.0)
        for reader in outputs + errors:
            reader.join()


def test_a_process_that_stays_stopped_ends_the_others_at_the_limit(tmp_path):
    with together(SCRIPT, tmp_path, variables(LOCKSTEP_WORKER_TIMEOUT="3")) as scripts:
        outputs, errors = watch(scripts)
        stopped = time.monotonic()
        scripts[LOST].process.send_signal(signal.SIGSTOP)
        check_ends(scripts, outputs, errors, "not answered for 3 s", stopped, 3.0 + 2.0)
        scripts[LOST].process.kill()
        for reader in outputs + errors:
            reader.join()
