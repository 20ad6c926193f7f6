"""`lockstep devices` and `lockstep verify`, the latter mostly on the numpy reference, whose workers start fast."""

import importlib.util

import pytest
from typer.testing import CliRunner

from lockstep.cli import devices as hardware
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
    found = hardware.installed()
    result = lockstep("devices")
    assert result.exit_code == 0
    assert found == ["torch", "jax", "tensorflow"]
    assert all(name in result.output for name in found)
    assert "devices=None means" in result.output
    assert "core" in result.output


def test_devices_names_accelerators(monkeypatch):
    monkeypatch.setattr(hardware, "available", lambda framework: [f"cuda:{index}" for index in range(8)])
    assert "8 replicas: cuda:0 … cuda:7" in lockstep("devices").output


def test_devices_on_a_platform_without_workers(monkeypatch):
    def refuse():
        raise PlatformError("no memfd")

    monkeypatch.setattr(hardware, "require_linux", refuse)
    assert "one replica" in lockstep("devices").output


@pytest.mark.parametrize("framework", ["caffe", ""])
@pytest.mark.parametrize("command", ["demo", "verify"])
def test_a_framework_that_is_none(command, framework):
    result = lockstep(command, "--framework", framework)
    assert result.exit_code == 2
    assert f"Lockstep trains with torch, jax, tensorflow, mxnet. Got {framework!r}. Name one of these." in result.stderr


@pytest.mark.parametrize("command", ["demo", "verify"])
def test_a_framework_that_is_not_installed(command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optax" else name)
    result = lockstep(command, "--framework", "jax")
    assert result.exit_code == 2
    assert 'This needs jax. Install it: pip install "lockstep-train[jax]"' in result.stderr


@pytest.mark.parametrize("command", ["devices", "demo", "verify"])
def test_without_a_framework(command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = lockstep(command)
    assert result.exit_code == 2
    assert 'pip install "lockstep-train[torch]"' in result.stderr


# -- verify


def test_a_script_of_the_users_own(script):
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


def test_a_trainer_alone_that_does_not_take_them(script):
    result = lockstep("verify", f"{script(MAKE)}:narrow", "--devices", "1,2", "--steps", 2)
    assert result.exit_code == 2
    assert "End the function with: return trainer, (x, y)" in result.stderr


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lost", "must give what lockstep.wrap returned, or (trainer, data). Got ndarray."),
        ("inexact", "verify checks the promise of equal bits."),
        ("nobody", "must define a function 'nobody'"),
    ],
)
def test_what_cannot_be_verified(script, function, message):
    result = lockstep("verify", f"{script(MAKE)}:{function}", "--devices", "1,2")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("devices", ["", "0,1", "one", "2,2", "1;2"])
def test_numbers_of_devices_that_are_none(devices):
    result = lockstep("verify", "--devices", devices)
    assert result.exit_code == 2
    assert "lists different whole numbers" in " ".join(result.stderr.split())


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
