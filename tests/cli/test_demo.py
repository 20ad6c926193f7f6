"""The demo runs its two scripts as a user would, and leaves nothing behind, also when it is interrupted."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.cli import demo, devices, scripts
from lockstep.errors import WorkerError

EXAMPLES = Path(__file__).parents[2] / "examples"


frameworks = pytest.mark.parametrize("framework", devices.PACKAGES)
LINES = {"torch": 12, "jax": 14, "tensorflow": 16, "mxnet": 17}


@frameworks
def test_the_script_is_the_example(framework):
    own = scripts.load_scripts(framework)
    assert (EXAMPLES / own.file).read_text(encoding="utf-8") == own.train
    assert len([line for line in own.train.splitlines() if line]) == LINES[framework]


SAME = {
    "torch": ["manual_seed(0)", "lr=0.1, momentum=0.9", "CrossEntropyLoss()"],
    "jax": ["rngs = nnx.Rngs(0)", "dense, last = ", "optax.sgd(0.1, 0.9)", "optax.softmax_cross_entropy"],
    "tensorflow": ["set_random_seed(0)", "norm = ", "SparseCategoricalCrossentropy", "keras.optimizers.SGD(0.1, 0.9)"],
    "mxnet": ["mx.random.seed(0)", "net.add(", '"sgd", {"learning_rate": 0.1, "momentum": 0.9}', "Xavier()"],
}


@frameworks
def test_both_scripts_train_the_same(framework):
    own = scripts.load_scripts(framework)
    net = re.search(r"net = .*", own.train).group()
    for same in (net, *SAME[framework]):
        assert own.train.count(same) == own.peer.text.count(same) == 1
    assert "batch_size=256" in own.train
    assert "256" in own.peer.text
    assert demo._with_epochs(own.train, 2).count("epochs=2") == 1
    other = demo._with_epochs(own.peer.text, 2)
    assert other.count("range(2)") + other.count("epochs=2") == 1


def test_the_error_of_a_failing_script_has_its_stderr():
    with pytest.raises(WorkerError, match=r"(?s)train.py failed with exit code 1\. Its error output:.*no such thing"):
        demo.run_script("Lockstep", "train.py", "raise ValueError('no such thing')", 1, [])


def test_the_demo(tmp_path):
    command = [sys.executable, "-m", "lockstep.cli", "demo", "--epochs", "1", "--table", "picture/table.svg"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"(Lockstep|DDP) +(\d) +(0\.\d{4}) +([\d.]+) +([0-9a-f]{16})", result.stdout)
    assert [(name, count) for name, count, *_ in rows] == [
        *(("Lockstep", n) for n in "123"),
        ("DDP", "1"),
        ("DDP", "2"),
    ]
    digests = [row[-1] for row in rows]
    assert len(set(digests[:3])) == 1
    assert digests[3] != digests[4]
    assert len({row[2] for row in rows[:3]}) == 1
    assert "Lockstep: 1, 2 and 3 devices, the same model to the last bit." in result.stdout
    assert re.search(r"val acc: 0\.\d\d, [\d.]+ sec/epoch on 3 devices: cpu:0 … cpu:2", result.stdout)
    assert 'history.to_csv("history.csv")' in result.stdout
    assert (tmp_path / "lockstep-demo.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "picture" / "table.svg").read_text(encoding="utf-8")
    assert digests[0] in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")


@pytest.mark.parametrize(("script", "arguments"), [("train", ["cpu", "cpu"]), ("peer.text", ["2"])])
def test_an_interrupt_leaves_nothing_behind(script, arguments, tmp_path):
    code = (
        "from lockstep.cli import demo, scripts\n"
        f"text = demo._with_epochs(scripts.load_scripts('torch').{script}, 10**6)\n"
        f"demo.run_script('x', 'x.py', text, 2, {arguments!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        processes = wait_for(lambda: found if len(found := descendants(process.pid)) >= 2 else None, 200)
        folder = Path(os.readlink(f"/proc/{processes[0]}/cwd"))
        assert folder.name.startswith("lockstep-demo-")
        assert folder.parent == Path(tempfile.gettempdir())
        time.sleep(1.0)  # somewhere between importing and training
        processes = {*processes, *descendants(process.pid)}
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        for pid in descendants(process.pid):  # if the test failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in stderr
    wait_for(lambda: not any(alive(pid) for pid in processes), 60)
    assert not folder.exists()


def wait_for(condition, seconds):
    """What the condition gives, once it is true."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


def descendants(pid):
    """The processes below this one, nearest first."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return found[1:]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
