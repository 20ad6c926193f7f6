"""Processes that torchrun or `jax.distributed` has brought together: one world, and the bits of one process."""

import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="launched processes meet through torch.distributed")

SCRIPT = """
import json, sys
import numpy as np, optax
from flax import nnx
import lockstep

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(97, 33, rngs=rngs)
        self.norm = nnx.BatchNorm(33, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(33, 10, rngs=rngs)
    def __call__(self, x):
        return self.last(self.dropout(self.norm(nnx.relu(self.first(x)))))

generator = np.random.Generator(np.random.PCG64(1))
x, y = generator.standard_normal((300, 97), np.float32), generator.integers(0, 10, 300)
trainer = lockstep.wrap(Net(nnx.Rngs(0)), optax.adam(1e-2), "cross_entropy", metrics=["accuracy"], shards=8)
found = []
for size in (300, 61, 5):
    logs = trainer.step((x[:size], y[:size]))
    found.append([trainer.digest(), logs["loss"].hex(), logs["grad_norm"].hex()])
found.append(sorted(trainer.evaluate((x, y)).items()))
if trainer._team.first:
    print(json.dumps([len(trainer.devices), found]), flush=True)
"""


SHORT = """
import json, sys
import flax.linen as nn
import numpy as np, optax
from flax import nnx
import lockstep

class Net(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    def __call__(self, x):
        return self.last(self.norm(x))

x, y = np.random.Generator(np.random.PCG64(1)).standard_normal((24, 6), np.float32), np.arange(24) % 3
trainer = lockstep.wrap(Net(), optax.adam(1e-2), "cross_entropy", shards=4)
for size in (2, 24):  # two shards, both of the first process
    trainer.step((x[:size], y[:size]))
lazy = lockstep.wrap(nn.Dense(3), optax.adam(1e-2), "cross_entropy", shards=4)
try:
    lazy.step((x[:2], y[:2]))
    said = ""
except lockstep.LockstepError as error:
    said = str(error)
with open(f"{trainer._backend.devices[0]} of {len(trainer.devices)}.json", "w") as file:
    json.dump([trainer.digest(), said], file)
"""

DISTRIBUTED = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""


def environment(**more):
    return {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")} | more


def read(output, count):
    devices, found = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    assert devices == count
    return found


def by_torchrun(tmp_path, count, text=SCRIPT):
    script = tmp_path / "train.py"
    script.write_text(text)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"] if count > 1 else []
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_jax(tmp_path, count, **more):
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED + SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), address, str(count), str(index)],
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    outcomes = [process.communicate() for process in processes]
    return processes, outcomes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return read(by_torchrun(tmp_path_factory.mktemp("alone"), 1), 1)


@pytest.mark.parametrize("count", [2, 3, 4])  # three processes do not divide eight shards
def test_torchruns_processes_give_the_bits_of_one(count, tmp_path, alone):
    assert read(by_torchrun(tmp_path, count), count) == alone


@pytest.mark.parametrize("count", [2, 4])
def test_jax_distributeds_processes_give_the_bits_of_one(count, tmp_path, alone):
    processes, outcomes = by_jax(tmp_path, count, NPROC="64", JAX_NUM_CPU_DEVICES="8")
    assert [process.returncode for process in processes] == [0] * count, outcomes
    assert read(outcomes[0][0], count) == alone


def test_jax_distributed_asks_for_the_line_at_the_beginning(tmp_path):
    """It holds JAX's devices, so they cannot be made again."""
    processes, outcomes = by_jax(tmp_path, 2)
    assert all(process.returncode for process in processes)
    assert "jax.distributed holds it. Put this line first: import os; os.environ" in outcomes[0][1]


def test_a_process_may_have_no_shard_of_the_first_batch(tmp_path):
    for count in (1, 2):
        by_torchrun(tmp_path, count, SHORT)
    (one,), two = ([json.loads(file.read_text()) for file in tmp_path.glob(f"* of {count}.json")] for count in (1, 2))
    assert len(two) == 2
    assert {digest for digest, _ in two} == {one[0]}
    assert any("This one has none. Give wrap (module, module.init(key, x))" in said for _, said in two)
