"""Ray Train: TorchTrainer and TensorflowTrainer are joined as they are, JaxTrainer is refused with the way out."""

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from launchers.conftest import read_results, run

pytest.importorskip("ray", reason="ray is not installed: make test-launchers installs it into .venv-launchers")

DRIVER = Path(__file__).with_name("ray_driver.py")


def run_driver(name, folder):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return run([sys.executable, DRIVER, name, folder], PYTHONPATH=path, RAY_DEDUP_LOGS=0, RAY_USAGE_STATS_ENABLED=0)


def test_a_worker_that_dies_is_replaced_and_the_run_continues_exactly(digest, tmp_path):
    code, output = run_driver("TorchTrainer", tmp_path)
    assert code == 0, output
    assert set(read_results(output)) == {(2, digest)}  # Ray may print a line more than once
    epochs = Counter(re.findall(r"epoch (\d) on 2", output))
    assert epochs["0"] == epochs["3"]  # it went on, and not from the beginning
    assert epochs["2"] == 2 * epochs["3"]


def test_tensorflow_trainer(digest, tmp_path):
    code, output = run_driver("TensorflowTrainer", tmp_path)
    assert code == 0, output
    assert set(read_results(output)) == {(2, digest)}


def test_jax_trainer_is_refused(tmp_path):
    """It creates no process group on CPUs, so two silent copies of the run would train."""
    code, output = run_driver("JaxTrainer", tmp_path)
    assert code != 0
    assert "This is one of 2 workers of Ray Train without a group. Use ray.train.torch.TorchTrainer" in output
    assert read_results(output) == []
