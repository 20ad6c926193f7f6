"""The tests of Keras on JAX and on PyTorch, each in its own process: Keras chooses its backend on import."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import missing_packages

TESTS = Path(__file__).parents[2]
FILES = ["keras_conventions", "model_changes", "callback_logs", "backup_and_restore", "queue_variables"]
ALL_FRAMEWORKS = [f"test_{name}.py" for name in FILES]


@pytest.mark.parametrize(
    ("backend", "files"),
    [("jax", ALL_FRAMEWORKS), ("torch", [*ALL_FRAMEWORKS, "torch_workers.py", "torch_layer_attributes.py"])],
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
