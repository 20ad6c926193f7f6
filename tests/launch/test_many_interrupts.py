"""Ctrl-C, pressed many times at any moment, leaves nothing behind and closes nothing of the script's."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from launch import worker_entries as entries
from lockstep.launch.process import Process
from lockstep.launch.worker_pool import WorkerPool

# The script goes on after each Ctrl-C, as a notebook does. The last storm of a round is over before it counts.
SCRIPT = """
import gc, os, random, signal, sys, threading, time
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

INPUTS = np.zeros((64, 4), np.float32)
LABELS = np.zeros(64, np.int64)
count, seconds = int(sys.argv[1]), float(sys.argv[2])
opened, trainers = [], []


def interrupt(number, frame):
    # Python's own handler, but for the few lines of this script that catch the exception.
    if frame is None or frame.f_code not in (endure.__code__, interrupt.__code__):
        raise KeyboardInterrupt


def press(begin):
    begin.wait()
    time.sleep(delay)
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(seconds)


def endure(action):
    begin = threading.Event()
    storm = threading.Thread(target=press, args=(begin,))
    storm.start()
    while True:
        try:
            if storm not in threading.enumerate():
                return
            begin.set()
            action()
        except KeyboardInterrupt:
            pass


def wrap():
    trainer = lockstep.wrap(Dense([4, 8, 2], seed=1), SGD(0.1), "cross_entropy", devices=["cpu"] * 2, shards=4)
    trainers.append(trainer)


def open_file():
    opened.extend(map(os.open, ["/dev/null"], [os.O_RDONLY]))  # no signal handler can run between the two


def wrap_again():
    open_file()
    wrap()
    trainers.clear()


def step():
    open_file()
    trainers[0].step((INPUTS, LABELS))


def fit():
    open_file()
    trainers[0].fit((INPUTS, LABELS), epochs=20, batch_size=16, verbose=0)


def close():
    step()
    trainers[0].close()


def list_children():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid():
            yield f"process {name} {state}"


def list_held():
    held = [*list_children(), *(f"thread {thread.name}" for thread in threading.enumerate())]
    for name in os.listdir("/proc/self/fd"):
        try:
            held.append(f"descriptor {name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # of the listing itself
            continue
    return sorted(held)


def check(before):
    for descriptor in opened:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == "/dev/null", descriptor
        os.close(descriptor)
    opened.clear()
    for trainer in trainers:
        trainer.close()
    trainers.clear()
    if before is None:
        return
    deadline = time.monotonic() + 5
    while (held := list_held()) != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    left = [what for what in held if what not in before]
    assert not left, left
    assert held == before


def open_what_stays_open():
    wrap()
    step()
    check(None)


random.seed(0)
open_what_stays_open()
before = list_held()
signal.signal(signal.SIGINT, interrupt)
for number in range(int(sys.argv[3])):
    action = (wrap_again, step, fit, close)[number % 4]
    delay = random.uniform(0.0, 0.05)
    if action is not wrap_again:
        wrap()
        step()
    endure(action)
    check(before)
print("nothing left")
"""


@pytest.mark.parametrize(("count", "seconds", "rounds"), [(10, 0.033, 8), (5, 0.001, 15)])
def test_nothing_is_left_behind(tmp_path: Path, count: int, seconds: float, rounds: int) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(file), str(count), str(seconds), str(rounds)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.stdout.splitlines()[-1:] == ["nothing left"], result.stderr


@pytest.mark.parametrize("end", ["close", "stop"])
def test_interrupts_do_not_break_off_the_end_of_a_worker(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    kill = Process.kill

    def press_and_kill(process: Process) -> None:
        """Runs in the pool's thread, while the main thread waits for the end."""
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.03)
        kill(process)

    pool = WorkerPool()
    worker = pool.start("cpu:1", entries.echo)
    worker.wait_until_spawned()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(Process, "kill", press_and_kill)
    with pytest.raises(KeyboardInterrupt):
        {"close": pool.close, "stop": worker.stop}[end]()
    assert not Path(f"/proc/{worker.pid}").exists()
    assert worker.describe_end().startswith("was killed by SIGKILL")
    assert (worker.pidfd, worker.fileno()) == (-1, -1)
    pool.close()


def test_an_end_that_is_broken_off_goes_on() -> None:
    """Some other exception, raised by a signal handler of the script, ends the wait, and not the closing."""

    def leave(number: int, frame: object) -> NoReturn:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, leave)
    try:
        pool = WorkerPool()
        worker = pool.start("cpu:1", entries.sleep)
        worker.receive()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            pool.close()
        assert not worker.has_ended()
        pool.close()
        assert worker.has_ended()
        assert (worker.pidfd, worker.fileno()) == (-1, -1)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_while_the_thread_starts_closes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception out of `Thread.start`, which waits after the thread runs already."""
    start = threading.Thread.start

    def start_and_raise(thread: threading.Thread) -> None:
        start(thread)
        raise TimeoutError

    pool = WorkerPool()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_raise)
        with pytest.raises(TimeoutError):
            pool.start("cpu:1", entries.echo)
    worker = pool.start("cpu:2", entries.echo)
    worker.send(b"up")
    assert worker.receive() == b"up"
    pool.close()
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    del pool, worker
    gc.collect()
    for file in files:  # which have the numbers of the pool's descriptors
        os.close(file)
