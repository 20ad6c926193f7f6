"""`lockstep doctor`, on the numpy reference in a framework's place: a step costs no import of a framework."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep import __version__
from lockstep.cli import doctor, host_checks, scripts
from lockstep.cli.app import app
from lockstep.cli.host_checks import ABSENT, BROKEN, NOTE, OK, check_environment, check_launchers, check_shared_memory
from lockstep.cli.scripts import Peer, Scripts
from lockstep.cli.tested_versions import TESTED, describe_versions, find_version
from lockstep.errors import PlatformError
from lockstep.launch.host import Host
from lockstep.launch.shm import Region

ROOT = Path(__file__).parents[2]
STEPS = """
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense

def make_trainer(devices, shards):
    trainer = lockstep.wrap(Dense([4, 2], seed=0), SGD(0.1), "cross_entropy", devices=devices, shards=shards)
    return trainer, (np.eye(4), np.arange(4) % 2)
"""


@pytest.fixture
def framework(monkeypatch):
    """Installs a framework called numpy, whose script is given; returns what the command prints."""

    def run(script):
        monkeypatch.setattr(doctor, "PACKAGES", {"numpy": ("numpy",)} if script else {})
        monkeypatch.setattr(scripts, "load_scripts", lambda name: Scripts("", "", script, Peer("", "", "", "")))
        monkeypatch.setattr(doctor, "_REPORT", "report([step, []])")
        return CliRunner().invoke(app, ["doctor"])

    return run


def test_nothing_is_broken(framework):
    result = framework(STEPS)
    assert result.exit_code == 0, result.output
    assert re.search(r"(ok|note) +numpy +\d[\d.]+; a step on cpu:0, \d+ thread", result.output)
    assert re.search(r"ok +replicas +two processes have made a step together", result.output)
    assert "Nothing is broken." in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_framework_that_fails_is_told_with_the_reason(framework):
    result = framework(STEPS + "\nraise RuntimeError('no such symbol')")
    assert result.exit_code == 1
    assert re.search(r"broken +numpy .*no step could be made", result.output)
    assert "RuntimeError: no such symbol" in result.output
    assert "checks failed" in result.output


def test_without_a_framework_there_is_something_to_install(framework):
    result = framework(None)
    assert result.exit_code == 1
    assert 'pip install "lockstep-train[torch]"' in result.output


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("import time; time.sleep(60)", "No answer in 0.5 seconds."),
        ("raise ValueError('first\\nlast')", "last"),
        ("raise SystemExit(3)", "No message."),
        ("print('[1]'); raise SystemExit(0)", "The process ended without a report."),
    ],
)
def test_how_a_process_fails(script, error):
    trial = doctor.try_script(script, seconds=0.5 if "sleep" in script else 30.0)
    assert trial.report is None
    assert error in trial.error


def test_a_report_is_found_among_what_a_framework_prints():
    script = "import atexit; atexit.register(print, 'bye'); print('noise', end=''); report([1])"
    assert doctor.try_script(script) == doctor.Trial([1])


def test_a_table_that_is_not_read_to_its_end_ends_quietly():
    script = (
        "from lockstep.cli import app, doctor\n"
        "doctor.diagnose = lambda: [doctor.Finding('a', 'b')]\n"
        "app.app(['doctor'])"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("name", "value", "state", "advice"),
    [
        ("LOCKSTEP_DEVICES", "2", OK, ""),
        ("LOCKSTEP_DEVICES", "cuda:7", BROKEN, "cuda:7"),
        ("LOCKSTEP_WORKER_TIMEOUT", "soon", BROKEN, "must be a number of seconds"),
        ("LOCKSTEP_DEVICE", "2", NOTE, "It reads LOCKSTEP_DEVICES."),
        ("OMP_NUM_THREADS", "1", OK, ""),
    ],
)
def test_variables(monkeypatch, name, value, state, advice):
    monkeypatch.setenv(name, value)
    (finding,) = (each for each in check_environment([]) if each.subject == name)
    assert (finding.text, finding.state) == (value, state)
    assert advice in finding.advice


def test_launchers(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}" if name == "srun" else None)
    (finding,) = check_launchers()
    assert finding.text == "srun (not found: torchrun, mpirun, ray)"
    monkeypatch.setenv("RANK", "1")  # and none of the others
    _, launched = check_launchers()
    assert launched.state == BROKEN
    assert "WORLD_SIZE is not set" in launched.advice


def test_shared_memory(monkeypatch, tmp_path):
    def refuse(name):
        raise PlatformError("no memfd here")

    assert [finding.state for finding in check_shared_memory(tmp_path / "none")] == [OK, ABSENT]
    monkeypatch.setattr(Region, "create", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    memfd, shm = check_shared_memory()
    assert (memfd.state, memfd.text) == (NOTE, "no memfd here")
    assert (shm.state, shm.text) == (NOTE, "64 MiB free")


def test_a_driver_without_a_framework_that_uses_it(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_DRIVERS", (str(tmp_path),))
    assert doctor._check_accelerators([], ["torch"]).state == NOTE
    assert doctor._check_accelerators(["cuda:0"], ["torch"]).text == "cuda:0"


def test_one_core_is_noted(monkeypatch):
    monkeypatch.setattr(host_checks, "read_host", lambda: Host(0.5, 1 << 30, 0))
    finding = host_checks.check_cores()
    assert finding.state == NOTE
    assert finding.text.startswith("0.5 of ")


def test_a_version_that_was_not_tested(monkeypatch):
    monkeypatch.setitem(TESTED, "numpy", ("9.0", "9.1"))
    assert describe_versions(["numpy"])[1].startswith(f"numpy {find_version('numpy')} is older than the oldest version")


def test_the_tested_versions_are_the_projects_bounds():
    """Their oldest is the lower bound in pyproject.toml, their newest the one in the constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    lowest = dict(re.findall(r"([\w-]+)[>=]=([\d.]+)", "\n".join([*named, f"Python{project['requires-python']}"])))
    pins = (ROOT / "constraints-mxnet.txt").read_text(encoding="utf-8")
    pins += (ROOT / "constraints.txt").read_text(encoding="utf-8")
    newest = dict(re.findall(r"^([\w-]+)==([\d.]+)", pins, re.M))
    newest["Python"] = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))[-1]
    for package, bounds in TESTED.items():
        name = package if package in newest else f"{package}-cpu"
        assert bounds == (lowest[package], newest[name])


def test_the_citation_names_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
