"""What the tests of all launchers share: the script, its digest on one process, and the programs that must be there."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Launchers are no part of `make test`: `make test-launchers` builds their environment and runs them in it.
collect_ignore_glob = [] if Path(sys.prefix).name == ".venv-launchers" else ["*"]

SCRIPT = Path(__file__).with_name("train.py")
SECONDS = 280  # below the limit of a test; an idle machine needs a tenth


def run(command, **variables):
    """Runs a command to its end; returns its exit code and all that it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout


def run_together(commands, variables):
    """Runs commands side by side, each with its variables; returns what they ended with and printed."""
    processes = [
        subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **{name: str(value) for name, value in own.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def read_results(output):
    """Returns (number of processes, digest) of every process that came to its end."""
    return [(int(count), digest) for count, digest in re.findall(r"result (\d+) ([0-9a-f]{64})", output)]


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def require(*programs, package):
    """Skips the tests of a module if a program is missing, and says which package has it."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install {package}", allow_module_level=True)


@pytest.fixture(scope="session")
def digest():
    """The digest of the script as `python train.py`."""
    code, output = run([sys.executable, SCRIPT])
    assert code == 0, output
    ((count, digest),) = read_results(output)
    assert count == 1
    return digest
