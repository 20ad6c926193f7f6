"""Processes that torchrun or `jax.distributed` started give the bits of one process."""

import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="launched processes meet through torch.distributed")

HEAD = """
import json, sys
import jax.numpy as jnp, numpy as np, optax
from flax import linen, nnx
import lockstep

def drawn(key, shape, dtype, *_, **__):  # XLA would compile each draw for seconds
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape) / 10, dtype)

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(97, 33, kernel_init=drawn, rngs=rngs)
        self.norm = nnx.BatchNorm(33, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(33, 10, kernel_init=drawn, rngs=rngs)
    def __call__(self, x):
        return self.last(self.dropout(self.norm(nnx.relu(self.first(x)))))

generator = np.random.Generator(np.random.PCG64(1))
x, y = generator.standard_normal((61, 97), np.float32), generator.integers(0, 10, 61)
"""

SCRIPT = """
trainer = lockstep.wrap(Net(nnx.Rngs(0)), optax.adam(1e-2), "cross_entropy", metrics=["accuracy"], shards=8)
found = []
for size in (61, 5, 60):
    logs = trainer.step((x[:size], y[:size]))
    found.append([trainer.digest(), logs["loss"].hex(), logs["grad_norm"].hex()])
found.append(sorted(trainer.evaluate((x, y)).items()))
if trainer.session.processes.first:
    print(json.dumps([len(trainer.devices), found]), flush=True)
"""

SHORT = """
trainer = lockstep.wrap(Net(nnx.Rngs(0)), optax.adam(1e-2), "cross_entropy", shards=4)
for size in (2, 24):  # two shards, both of the first process
    trainer.step((x[:size], y[:size]))

class Centred(linen.Module):
    @linen.compact
    def __call__(self, x):
        mean = self.param("mean", lambda key: x.mean(0))
        return linen.Dense(10, kernel_init=drawn)(x - mean)

found = [trainer.digest()]
pipeline = lockstep.data.arrays(x, y).batch(61)
for first in ("step", "short step", "predict", "pipeline"):
    lazy = lockstep.wrap(Centred(), optax.adam(1e-2), "cross_entropy", shards=4)
    if first == "predict":
        lazy.predict(x[:2])
    elif first == "pipeline":
        lazy.fit(pipeline, verbose=0)
    else:
        size = 2 if first == "short step" else 61
        lazy.step((x[:size], y[:size]))
    found.append(lazy.digest())

tx = [optax.inject_hyperparams(optax.sgd)(rate) for rate in (0.25, 0.125)]
before = lockstep.wrap(Centred(), tx[0], "cross_entropy", shards=4)
before.step((x, y))
for rate in (None, 0.5):  # set while the state waits for a batch
    after = lockstep.wrap(Centred(), tx[1], "cross_entropy", shards=4)
    after.load_state(before.state())
    if rate:
        after.learning_rates = [rate]
    after.step((x, y))
    assert after.learning_rates == (rate or 0.25,), after.learning_rates
    found.append(after.digest())
with open(f"{trainer.session.own_devices[0]} of {len(trainer.devices)}.json", "w") as file:
    json.dump(found, file)
"""

TURNED = """
class Scaled(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(97, 10, kernel_init=drawn, rngs=nnx.Rngs(0))])
        self.layers[0].scale, self.word = 1.0, "old"
    def __call__(self, x):
        return self.layers[0](x) * self.layers[0].scale * (2 if self.word == "new" else 1)

class Turning(lockstep.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.trainer.model.layers[0].scale = 1.0 + epoch
        if epoch == 1:
            self.trainer.model.word, self.trainer.model.more = "new", 3
    def on_train_end(self, logs=None):
        self.trainer.model.layers[0].scale = 9.0
        del self.trainer.model.more

model = Scaled()
trainer = lockstep.wrap(model, optax.sgd(0.1), "cross_entropy", shards=4)
trainer.fit((x, y), epochs=3, batch_size=61, verbose=0, callbacks=[Turning()])
found = trainer.session.backend.controls(), trainer.digest()
with open(f"turned {trainer.session.own_devices[0]} of {len(trainer.devices)}.json", "w") as file:
    json.dump(found, file)
"""

ONE = """
import torch.distributed

def apply(variables, x):
    return jnp.tanh(x @ variables["first"]) @ variables["last"]

def trained():
    variables = {"first": drawn(None, (97, 33), "float32"), "last": drawn(None, (33, 10), "float32")}
    with lockstep.wrap((apply, variables), optax.adam(1e-2), "cross_entropy", shards=1, precision="bf16") as trainer:
        for _ in range(5):
            trainer.step((x, y))
        return trainer.digest(), type(trainer.session.processes).__name__

plain = trained()
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print(json.dumps([1, [plain, trained()]]), flush=True)
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


def by_torchrun(folder, count, text):
    script = folder / "train.py"
    script.write_text(HEAD + text)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"] if count > 1 else []
    command = [sys.executable, *launcher, str(script), str(folder / "store")]
    done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read(done.stdout, count)


def by_jax(tmp_path, count, **more):
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED + HEAD + SCRIPT)
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
def folder(tmp_path_factory):
    """Runs SHORT in one process and in two, and returns the folder with their results."""
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def alone(folder):
    return by_torchrun(folder, 1, SCRIPT + SHORT + TURNED)


@pytest.fixture(scope="module")
def two(folder):
    return by_torchrun(folder, 2, SCRIPT + SHORT + TURNED)


def written(folder, name):
    """Returns what the single process and what each of the two wrote."""
    alone, both = ([json.loads(file.read_text()) for file in folder.glob(f"{name} of {n}.json")] for n in (1, 2))
    assert (len(alone), len(both)) == (1, 2)
    return alone, both


def test_two_torchrun_processes_give_the_bits_of_one(two, alone):
    assert two == alone


def test_three_jax_distributed_processes_with_eight_shards_give_the_bits_of_one(tmp_path, alone):
    processes, outcomes = by_jax(tmp_path, 3, NPROC="64", JAX_NUM_CPU_DEVICES="8")
    assert [process.returncode for process in processes] == [0] * 3, outcomes
    assert read(outcomes[0][0], 3) == alone


def test_one_launched_process_gives_the_bits_of_an_unlaunched_one(tmp_path):
    """With one shard too: its step is one program, and gradient and update as two programs round differently."""
    (plain, alone), (launched, joined) = by_torchrun(tmp_path, 1, ONE)
    assert (alone, joined) == ("SingleProcess", "LaunchedProcesses")
    assert launched == plain


def test_jax_distributed_needs_jax_to_be_configured_first(tmp_path):
    """It uses JAX's devices, so they cannot be created again."""
    processes, outcomes = by_jax(tmp_path, 2)
    assert all(process.returncode for process in processes)
    assert "jax.distributed uses its devices. Begin the script with this line: import os; os.environ" in outcomes[0][1]


def test_a_process_may_have_no_shard_of_the_first_batch(folder, alone, two):
    """A linen module is initialized from the batch's first shard, in whichever process that is computed."""
    (one,), both = written(folder, "cpu*")
    assert both == [one, one]


def test_scalars_and_strings_set_by_a_callback_reach_every_process(folder, alone, two):
    """Callbacks run in the first; the others have the same values when `fit` returns."""
    (one,), both = written(folder, "turned*")
    assert '"scale": 9.0' in one[0]["model"]
    assert both == [one, one]
