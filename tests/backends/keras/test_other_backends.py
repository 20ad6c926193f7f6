"""Keras chooses its backend when it is imported: its tests for every backend, in a process for each of the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import missing_packages

TESTS = Path(__file__).parents[2]


EVERYWHERE = ["test_keras_conventions.py", "test_model_changes.py", "test_logs.py", "test_backups.py"]
EVERYWHERE += ["test_queue_variables.py"]


@pytest.mark.parametrize(
    ("backend", "files"), [("jax", EVERYWHERE), ("torch", [*EVERYWHERE, "two_processes.py", "layer_attributes.py"])]
)
def test_every_test_for_all_backends_passes(backend, files, tmp_path):
    unused = {"tensorflow", "jax", "matplotlib"} - {backend}
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": missing_packages.path(tmp_path, *unused)}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider"]
    command += [str(Path(__file__).with_name(name)) for name in files]
    done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 13
