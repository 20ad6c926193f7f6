"""`lockstep devices` and `lockstep verify`, the latter mostly on the numpy reference, whose workers start fast."""

import importlib.util
import io
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lockstep import __version__ as version
from lockstep.cli import devices as hardware
from lockstep.cli import verify as verification
from lockstep.cli.app import app
from lockstep.errors import PlatformError

MAKE = """
import os
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

random = np.random.default_rng(0)
data = random.normal(size=(40, 6)), random.integers(0, 3, 40)

def make_trainer(**options):
    return lockstep.wrap(Dense([6, 5, 3], seed=1), SGD(0.1), "cross_entropy", devices=1, **options), data

def inexact():
    return make_trainer(exact=False)

def alone():
    return lockstep.wrap(Dense([64, 10], seed=1), SGD(0.1), "cross_entropy")

def narrow():
    return lockstep.wrap(Dense([6, 3], seed=1), SGD(0.1), "cross_entropy")

def lost():
    return data
"""

PROCESS = """
import os
import torch
import lockstep
from lockstep.datasets import digits

@lockstep.objective
def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1 + os.getpid() / 1e6)

def make_trainer():
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    return lockstep.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, devices=["cpu"]), digits()[0]
"""


def lockstep(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


# -- devices


def test_devices_of_the_installed_frameworks():
    found = hardware.list_installed()
    result = lockstep("devices")
    assert result.exit_code == 0
    assert found == ["torch", "jax", "tensorflow"]
    assert all(name in result.output for name in found)
    assert "devices=None means" in result.output
    assert "core" in result.output


def test_devices_names_accelerators(monkeypatch):
    monkeypatch.setattr(hardware, "list_accelerators", lambda framework: [f"cuda:{index}" for index in range(8)])
    assert "8 replicas: cuda:0 … cuda:7" in lockstep("devices").output


def test_devices_on_a_platform_without_workers(monkeypatch):
    def refuse():
        raise PlatformError("no memfd")

    monkeypatch.setattr(hardware, "require_linux", refuse)
    assert "one replica" in lockstep("devices").output


@pytest.mark.parametrize("framework", ["caffe", ""])
@pytest.mark.parametrize("command", ["demo", "verify"])
def test_an_unknown_framework_is_refused(command, framework):
    result = lockstep(command, "--framework", framework)
    assert result.exit_code == 2
    assert f"--framework {framework!r} is not supported. Use one of torch, jax, tensorflow, mxnet." in result.stderr


@pytest.mark.parametrize("command", ["demo", "verify"])
def test_a_framework_that_is_not_installed(command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optax" else name)
    result = lockstep(command, "--framework", "jax")
    assert result.exit_code == 2
    assert 'jax is not installed. Install it: pip install "lockstep-train[jax]"' in result.stderr


@pytest.mark.parametrize("command", ["devices", "demo", "verify"])
def test_no_framework_is_installed(command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = lockstep(command)
    assert result.exit_code == 2
    assert 'pip install "lockstep-train[torch]"' in result.stderr


# -- verify


def test_verify_a_script_of_the_user(script):
    path = script(MAKE)
    result = lockstep("verify", f"{path}:make_trainer", "--devices", "1,2", "--batch-size", 8, "--steps", 6)
    assert result.exit_code == 0, result.output + result.stderr
    rows = [line.split() for line in result.output.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == list("123456")  # more steps than an epoch has
    assert all(len(row) == 3 and row[1] == row[2] and len(row[1]) == 16 for row in rows)
    assert len({row[1] for row in rows}) == 6
    assert "The same bits after each of 6 steps on 1 and 2 devices." in result.output


def test_a_trainer_alone_gets_the_digits(script):
    result = lockstep("verify", f"{script(MAKE)}:alone", "--devices", "1,2", "--steps", 2)
    assert result.exit_code == 0, result.output + result.stderr


def test_a_trainer_alone_that_does_not_fit_the_digits(script):
    result = lockstep("verify", f"{script(MAKE)}:narrow", "--devices", "1,2", "--steps", 2)
    assert result.exit_code == 2
    assert "End the function with: return trainer, (x, y)" in result.stderr


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lost", "returned ndarray, not a trainer from lockstep.wrap, or (trainer, data)."),
        ("inexact", "verify cannot be used with exact=False"),
        ("nobody", "defines no function 'nobody'"),
    ],
)
def test_functions_that_cannot_be_verified(script, function, message):
    result = lockstep("verify", f"{script(MAKE)}:{function}", "--devices", "1,2")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("devices", ["", "0,1", "one", "2,2", "1;2", "16"])  # one number compares nothing
def test_numbers_of_devices_that_are_none(devices):
    result = lockstep("verify", "--devices", devices)
    assert result.exit_code == 2
    assert "must be two or more different numbers of devices" in " ".join(result.stderr.split())


def test_shards_belong_to_the_scripts_trainer(script):
    result = lockstep("verify", f"{script(MAKE)}:make_trainer", "--shards", 4)
    assert result.exit_code == 2
    assert "lockstep.wrap(..., shards=...)" in " ".join(result.stderr.split())


def test_the_framework_is_the_scripts_own(script):
    result = lockstep("verify", f"{script(MAKE)}:make_trainer", "--framework", "jax")
    assert result.exit_code == 2
    assert "Leave --framework out" in " ".join(result.stderr.split())


def test_the_built_in_model():
    result = lockstep("verify", "--devices", "1,2", "--steps", 2, "--shards", 3, "--batch-size", 50)
    assert result.exit_code == 0, result.output + result.stderr
    assert "The same bits after each of 2 steps on 1 and 2 devices." in result.output


def test_bits_that_follow_the_process_are_found(script):
    result = lockstep("verify", f"{script(PROCESS)}:make_trainer", "--devices", "1,2", "--steps", 2)
    assert result.exit_code == 1
    assert "With 2 devices 'model.weight' differs from 1 after step 1." in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError"),
        ("def make_trainer():\n    raise ValueError('no data here')\n", "no data here"),
        ("def make_trainer(net):\n    pass\n", "missing 1 required positional argument"),
        ("import sys\nsys.exit(1)\n", "SystemExit: 1"),
    ],
)
def test_a_failing_script_does_not_exit_with_1(script, text, words):
    """Exit code 1 is for different bits alone; a script's own error keeps its traceback."""
    result = lockstep("verify", f"{script(text)}:make_trainer", "--devices", "1,2")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert words in result.stderr


def test_a_script_does_not_get_the_commands_arguments(script):
    path = script("import sys\nassert sys.argv == [__file__], sys.argv\n" + MAKE)
    result = lockstep("verify", f"{path}:make_trainer", "--devices", "1,2", "--steps", 1)
    assert result.exit_code == 0, result.stderr
    assert "The same bits after 1 step on 1 and 2 devices." in result.output


def test_an_interrupt_exits_with_130(script):
    result = lockstep("verify", f"{script('def make_trainer(): raise KeyboardInterrupt')}:make_trainer")
    assert result.exit_code == 130


def test_eight_columns_fit_into_a_narrow_terminal():
    """With bare numbers as headings and digests that are not cut off in the middle."""
    output = io.StringIO()
    console = Console(file=output, width=80)
    console.print(verification._build_table(dict.fromkeys(range(1, 9), ("0123456789abcdef",)), console.width))
    heading, _, row = [line.split() for line in output.getvalue().splitlines() if line.strip()]
    assert heading == ["step", *"12345678"]
    assert len(row) == 9
    assert "…" not in output.getvalue()


def test_the_picture_of_the_demo_is_checked_before_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    result = lockstep("demo", "--table", tmp_path / "file" / "table.svg")
    assert result.exit_code == 2
    assert f"--table {tmp_path}/file/table.svg cannot be written: " in result.stderr


# -- the command itself


def test_version():
    assert lockstep("--version").output == f"lockstep {version}\n"


def test_python_m_lockstep():
    result = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"lockstep {version}\n")
