"""Workers end with the script, in whatever way it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# `busy` workers do not read their channel, so only a signal can end them.
SCRIPT = """
import os, sys, time
from lockstep.launch.worker_pool import WorkerPool

def idle(channel):
    while True:
        channel.send(channel.receive())

def busy(channel):
    channel.send(channel.receive())
    time.sleep(600)

pool = WorkerPool()
workers = [pool.start("cpu:1", busy), pool.start("cpu:2", idle)]
for worker in workers:
    worker.send(b"up")
    worker.receive()
print(*[worker.pid for worker in workers], flush=True)
"""

INTERRUPTED = """
try:
    print("waiting", flush=True)
    workers[1].receive()
except KeyboardInterrupt:
    print("interrupted")
    time.sleep(0.2)  # for the signal to end a worker that does not ignore it
    print("alive", *[not worker.has_ended() for worker in workers])
    workers[1].send(b"after")
    print(workers[1].receive().decode())
    pool.close()
    print("closed")
"""

FORKED = """
import warnings
warnings.simplefilter("ignore")  # of threads, from Python 3.12 on
if os.fork() == 0:
    sys.exit()
os.wait()
workers[1].send(b"the copy's end is not ours")
workers[1].receive()
"""


@contextmanager
def script(tmp_path: Path, ending: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script of its own process group that has started two workers, and their pids."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT + ending)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0, env=environment
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        try:
            yield process, pids
        finally:
            process.kill()
            for pid in filter(running, pids):
                os.kill(pid, signal.SIGKILL)


def running(pid: int) -> bool:
    """Whether the process runs; one that is dead and waits for its heir does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int]) -> bool:
    """Whether the processes end within a minute, which is far less than they sleep."""
    before = time.monotonic()
    while any(map(running, pids)) and time.monotonic() - before < 60:
        time.sleep(0.01)
    return not any(map(running, pids))


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit(4)", 4, ""),
        ("raise ValueError('the script fails')", 1, "ValueError: the script fails"),
        ("del pool", 0, ""),
        ("import threading; threading.Thread(target=time.sleep, args=(0.1,)).start()", 0, ""),
        (FORKED, 0, ""),
    ],
)
def test_a_script_that_ends(tmp_path: Path, ending: str, code: int, error: str) -> None:
    with script(tmp_path, ending) as (process, pids):
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == code, stderr
        assert not any(map(running, pids))  # reaped before the script's own end
        assert error in stderr
        assert error or not stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_script_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    with script(tmp_path, "time.sleep(600)") as (process, pids):
        assert all(map(running, pids))
        os.kill(process.pid, number)
        assert gone(pids)
        assert process.wait(timeout=60) == -number


def test_a_script_killed_while_its_workers_start(tmp_path: Path) -> None:
    early = "import os\nfrom lockstep.launch.worker_pool import WorkerPool\npool = WorkerPool()\n"
    early += "def entry(channel): pass\nworkers = [pool.start(name, entry) for name in 'ab']\n"
    early += "for worker in workers: worker.wait_until_spawned()\n"
    (tmp_path / "early.py").write_text(
        early + "print(*[each.pid for each in workers], flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, str(tmp_path / "early.py")], stdout=subprocess.PIPE, timeout=120, env=environment
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    assert gone(pids)


def test_ctrl_c_reaches_the_script_alone(tmp_path: Path) -> None:
    with script(tmp_path, INTERRUPTED) as (process, pids):
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)
        for pid in pids:  # a launcher may send it to each
            os.kill(pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
        assert stdout.split() == ["interrupted", "alive", "True", "True", "after", "closed"], stderr
        assert process.returncode == 0
        assert not any(map(running, pids))


def test_ctrl_c_in_a_script_that_does_not_catch_it(tmp_path: Path) -> None:
    with script(tmp_path, "workers[1].receive()") as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
        assert "KeyboardInterrupt" in stderr
        assert not any(map(running, pids))
