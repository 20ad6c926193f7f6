"""Keras 3 on each of its backends: the same bits after every step on 1, 2, 3 and 4 devices with 4 shards.

On PyTorch every further device is a process, on JAX each model compiles for seconds. So there each model takes one
number of devices beside one; LOCKSTEP_FULL=1 gives every model all of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import missing_packages
from parity import recorded
from parity.matrix import Entry

HERE = Path(__file__).parent
BACKENDS = os.environ.get("LOCKSTEP_KERAS_BACKENDS", "tensorflow,torch,jax").split(",")
ALL = {"mlp": (1, 2, 3, 4), "lenet": (1, 2, 3, 4), "resnet": (1, 2, 3, 4)}
FEW = {
    "tensorflow": ALL,
    "torch": {"mlp": (1, 2), "lenet": (1, 3), "resnet": (1, 4)},
    "jax": {"mlp": (1, 2), "lenet": (1, 3), "resnet": (1, 4)},
}


def planned(backend):
    return ALL if "LOCKSTEP_FULL" in os.environ else FEW[backend]


@pytest.fixture(scope="module", params=BACKENDS)
def found(request, tmp_path_factory):
    """What every model gave on every number of devices, with Keras on one backend."""
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "found.json"
    unused = {"tensorflow", "jax", "matplotlib"} - {request.param}
    environment = {**os.environ, "KERAS_BACKEND": request.param, "PYTHONPATH": missing_packages.path(folder, *unused)}
    plan = [f"{model}:{','.join(map(str, counts))}" for model, counts in planned(request.param).items()]
    command = [sys.executable, "-m", "parity.keras_run", str(path), *plan]
    done = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, json.loads(path.read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["mlp", "lenet", "resnet"])
def test_devices_give_the_bits_of_one(found, model, matrix):
    backend, records = found
    reference = records[f"{model} 1"]
    different = []
    for devices in planned(backend)[model]:
        for (steps, seconds), (expected, _) in zip(records[f"{model} {devices}"], reference, strict=True):
            equal = sum(map(dict.__eq__, steps, expected))
            case = model if "outputs" not in steps[0] else f"{model}, evaluate, predict"
            known = recorded.check("keras", f"{case} on {backend}", expected)
            matrix.append(Entry("keras", f"{case} on {backend}", 4, devices, equal, len(steps), seconds, known))
            assert len(steps) == len(expected) > 0
            different += [devices] * (equal < len(steps) or known == "other")
    assert not different
