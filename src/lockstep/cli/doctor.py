"""`lockstep doctor`: checks what is installed, whether it works here, and what to do about each problem.

Every framework makes one real step in a process of its own, so that a crash or a hang of one is a row of the table.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep import __version__
from lockstep.backends import registry
from lockstep.cli import host_checks, scripts
from lockstep.cli.devices import PACKAGES
from lockstep.cli.host_checks import ABSENT, BROKEN, NOTE, OK, Finding
from lockstep.cli.tested_versions import describe_versions, find_version
from lockstep.errors import PlatformError
from lockstep.exchange.barrier import require_ordered_writes
from lockstep.launch import environment
from lockstep.launch.worker_pool import require_linux

_SECONDS = 120.0  # for one step; the first import of a framework from a network drive takes long
_WIDTH = 80
_STYLES = {OK: "green", NOTE: "yellow", BROKEN: "bold red", ABSENT: "dim"}
_CORE = ("numpy", "ml_dtypes", "cloudpickle", "rich", "typer")
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd")  # NVIDIA's and AMD's

_REPORTED = "lockstep doctor reports: "  # the beginning of the line with a report, among what a framework prints

# What a process runs, up to a call of `report`. The script that defines `make_trainer` comes before `_STEP`.
_REPORTER = f"""
def report(value):
    import json
    print({chr(10) + _REPORTED!r} + json.dumps(value))
"""
_STEP = """
trainer, (x, y) = make_trainer(devices=1, shards=1)
trainer.step((x[:32], y[:32]), verbose=0)
threads = trainer.session.run.threads
used = f", {threads} thread{'s' * (threads > 1)}" if trainer.devices[0].startswith("cpu") else ""
step = f"; a step on {trainer.devices[0]}{used}"
"""
_REPORT = """
from lockstep.cli.devices import list_accelerators
report([step, list(list_accelerators(FRAMEWORK))])
"""
_TWO_REPLICAS = """
import numpy as np
import lockstep
from lockstep.backends.numpy import SGD, Dense
with lockstep.wrap(Dense([4, 2], seed=0), SGD(0.1), "cross_entropy", devices=2, shards=2) as trainer:
    trainer.step((np.eye(4), np.arange(4) % 2), verbose=0)
report([])
"""


@dataclass(frozen=True)
class Trial:
    """The result of a script in a separate process: what it has given to `report`, or how it failed."""

    report: Any = None
    error: str = ""


def run_doctor(console: Console) -> bool:
    """Prints the findings and what to do about them; returns whether nothing is broken."""
    with console.status("one step with each framework that is installed"):
        findings = list(diagnose())
    width = min(console.width, _WIDTH)
    table = Table("", "", "found", box=box.SIMPLE_HEAD)
    for finding in findings:
        table.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.subject, Text(finding.text))
    console.print(table, width=width)
    for finding in findings:
        if finding.advice:
            label = Text.assemble("  ", (finding.state, _STYLES[finding.state]), f"  {finding.subject}")
            console.print(label, Padding(Text(finding.advice), (0, 2, 1, 4)), width=width)
    broken = sum(finding.state == BROKEN for finding in findings)
    verdict = f"{broken} of {len(findings)} checks failed." if broken else "Nothing is broken."
    console.print(Text(f"  {verdict}", style=_STYLES[BROKEN if broken else OK]))
    return not broken


def diagnose() -> Iterator[Finding]:
    """Yields all findings, in the order of the table."""
    yield Finding("Lockstep", f"{__version__} on {platform.system()} {platform.machine()}")
    yield _judge_versions("Python", ["Python"])
    yield _judge_versions("packages", _CORE)
    accelerators: list[str] = []
    frameworks = [name for name, needed in PACKAGES.items() if any(map(find_version, needed))]
    frameworks += [name for name in registry.list_outside() if name not in PACKAGES]
    for framework in frameworks:
        finding, found = _check_framework(framework)
        accelerators += found
        yield finding
    if not frameworks:
        advice = 'Install one of them, for example: pip install "lockstep-train[torch]"'
        yield Finding("frameworks", f"none of {', '.join(PACKAGES)} is installed", BROKEN, advice)
    yield _check_accelerators(list(dict.fromkeys(accelerators)), frameworks)
    yield _check_replicas()
    if hasattr(os, "sched_getaffinity"):
        yield host_checks.check_cores()
    yield from host_checks.check_shared_memory()
    yield from host_checks.check_launchers()
    yield from host_checks.check_environment(accelerators)


def _judge_versions(subject: str, packages: Sequence[str], more: str = "") -> Finding:
    text, advice = describe_versions(packages)
    return Finding(subject, text.removeprefix(f"{subject} ") + more, NOTE if advice else OK, advice)


def _check_framework(framework: str) -> tuple[Finding, list[str]]:
    """Makes one step with a framework; returns the finding and the framework's accelerators."""
    packages = PACKAGES.get(framework, (framework,))
    missing = [package for package in packages if find_version(package) is None]
    if missing and framework in PACKAGES:
        advice = f'Install what is missing, if you use {framework}: pip install "lockstep-train[{framework}]"'
        return Finding(framework, f"{' and '.join(missing)} not installed", ABSENT, advice), []
    script = scripts.load_scripts(framework).verify + _STEP if framework in PACKAGES else 'step = ""'
    trial = try_script(f"{script}\nFRAMEWORK = {framework!r}\n{_REPORT}")
    if trial.report is None:
        advice = f"{trial.error}\n{_advise(framework)}"
        return Finding(framework, f"{describe_versions(packages)[0]}; no step could be made", BROKEN, advice), []
    step, accelerators = trial.report
    return _judge_versions(framework, packages, step), accelerators


def _advise(framework: str) -> str:
    if framework == "mxnet":
        return "MXNet needs Python 3.11 and NumPy 1.23 in an environment of its own: make setup builds .venv-mxnet."
    return f'If the reason is not clear, try a fresh environment: pip install "lockstep-train[{framework}]"'


def _check_accelerators(found: list[str], frameworks: Sequence[str]) -> Finding:
    if found:
        return Finding("accelerators", ", ".join(found))
    drivers = [path for path in _DRIVERS if Path(path).exists()]
    if not drivers or not frameworks:
        return Finding("accelerators", "none; training uses the CPU", ABSENT)
    advice = (
        f"The host has a driver ({drivers[0]}), and no framework finds a GPU. Install the framework's build for GPUs, "
        "and check that CUDA_VISIBLE_DEVICES does not hide them."
    )
    return Finding("accelerators", "none", NOTE, advice)


def _check_replicas() -> Finding:
    """Returns whether two replicas can train in two processes of this host."""
    try:
        require_linux()
        require_ordered_writes()
    except PlatformError as error:
        return Finding("replicas", "one", NOTE, str(error))
    trial = try_script(_TWO_REPLICAS)
    if trial.report is None:
        return Finding("replicas", "two processes could not make a step", BROKEN, trial.error)
    return Finding("replicas", "two processes have made a step together")


def try_script(text: str, seconds: float = _SECONDS) -> Trial:
    """Runs a script in a separate process; returns what the script has given to `report`, or how it failed."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_REPORTER}\n{text}"]
    try:
        done = subprocess.run(
            command, env=environment.build_worker_environment(), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Trial(error=f"No answer in {seconds:g} seconds.")
    if done.returncode == 0:
        for line in done.stdout.splitlines():
            if line.startswith(_REPORTED):
                return Trial(json.loads(line.removeprefix(_REPORTED)))
        return Trial(error="The process ended without a report.")
    last = (done.stderr.strip().splitlines() or ["No message."])[-1]
    if done.returncode < 0:
        return Trial(error=f"The process was ended by {signal.Signals(-done.returncode).name}. {last}")
    return Trial(error=last)
