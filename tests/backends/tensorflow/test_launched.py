"""Two processes launched by torchrun or with TF_CONFIG give the bits of one process."""

import json
import os
import socket
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import missing_packages
from backends.tensorflow import launched_script

COUNT = 2


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def list_torchrun_variables():
    """Returns the environment variables that torchrun sets in each process."""
    shared = {"WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    return [{**shared, "RANK": index, "LOCAL_RANK": index} for index in range(COUNT)]


def list_tf_config_variables():
    """Returns the environment variable of TensorFlow's multi-worker jobs for each process."""
    workers = [f"localhost:{free_port()}" for _ in range(COUNT)]
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(COUNT)]
    return [{"TF_CONFIG": json.dumps(task)} for task in tasks]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return missing_packages.path(tmp_path_factory.mktemp("path"), "jax", "matplotlib")


def start_process(path, variables):
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}
    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    code = f"from backends.tensorflow.launched_script import main; main({threads})"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(scope="module")
def expected():
    before = keras.config.floatx()
    keras.config.set_floatx("float32")
    yield launched_script.train()
    keras.config.set_floatx(before)


@pytest.mark.parametrize("launcher", [list_torchrun_variables, list_tf_config_variables])
def test_two_processes_give_the_bits_of_one(launcher, expected, path):
    processes = [start_process(path, variables) for variables in launcher()]
    outcomes = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * COUNT, outcomes[0][1][-3000:]
    found = json.loads(next(line for line in outcomes[0][0].splitlines() if line.startswith("[")))
    assert [entry[0] for entry in found[2::3]] == [COUNT] * 2
    for entry in found[2::3]:
        entry[0] = 1  # only the number of devices may differ
    assert found == expected


def test_the_error_without_torch_says_what_to_install(tmp_path):
    process = start_process(
        missing_packages.path(tmp_path, "jax", "matplotlib", "torch"), list_tf_config_variables()[1]
    )
    _, errors = process.communicate()
    assert process.returncode
    assert (
        "Processes that were launched together communicate through torch.distributed, which is not installed" in errors
    )
    assert 'pip install "lockstep-train[torch]"' in errors
