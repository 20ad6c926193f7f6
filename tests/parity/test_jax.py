"""JAX: the same bits after every step on 1, 2, 3, 4 and 8 devices, and in a fresh process for each number.

Compiling takes most of the time, so the models see few sizes of shard. They come in
three of the forms that `wrap` takes; (apply, variables) is LeNet's once it has variables.
"""

import json
import subprocess
import sys

import jax
import pytest

from lockstep.core import tree
from parity import jax_models as models
from parity.runs import Case, compare, run


def with_inputs(data):
    return data, data[0]


WORLDS = {
    "mlp": (
        models.mlp,
        [
            Case("nothing given, batch 512", 8, [models.features(512)]),
            Case("MLP 97 features, Adam, clipped", 8, [models.features(size) for size in (27, 61, 64, 5, 1)]),
            Case("fit 1,003 examples, tail of 3", 8, fit=(models.features(1003), 250)),
            Case("evaluate, predict", 8, forward=[with_inputs(models.features(size)) for size in (1, 5, 17)]),
        ],
    ),
    "lenet": (
        models.lenet,
        [Case("LeNet dropout, AdamW, schedule", 8, [models.images(size) for size in (61, 60, 3)])],
    ),
    "resnet": (
        models.resnet,
        [
            Case("ResNet-18 batch norm, SGD", 8, [models.small_images(size) for size in (61, 60)]),
            Case("evaluate, predict ResNet-18", 8, forward=[with_inputs(models.small_images(16))]),
        ],
    ),
}


def programme(name, devices):
    """Runs every case in turn on one world, and gives the cases with their records."""
    make, cases = WORLDS[name]
    more = {} if cases[0].name.startswith("nothing given") else {"shards": 8}
    with make(devices, **more) as trainer:
        assert len(trainer.devices) == devices <= len(jax.devices("cpu"))
        runs = [(case, run(trainer, case)) for case in cases]
        assert trainer.session.run.shards == 8
    return runs


@pytest.fixture(scope="module")
def references():
    return {name: programme(name, 1) for name in WORLDS}


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("name", WORLDS)
def test_devices_give_the_bits_of_one(name, devices, references, matrix):
    compare("jax", programme(name, devices), references[name], matrix)


def test_another_order_of_additions_gives_other_bits(references, monkeypatch):
    """The control: were the sums not sensitive to their order, equal digests would say nothing."""
    monkeypatch.setattr(tree.Span, "halves", property(from_left_to_right))
    tree._program.cache_clear()
    try:
        for (case, record), (_, other) in zip(programme("mlp", 1), references["mlp"], strict=True):
            if case.batches:
                assert record.equal(other) == 0, case.name
    finally:
        tree._program.cache_clear()


def from_left_to_right(node):
    return tree.Span(node.start, node.stop - 1), tree.Span(node.stop - 1, node.stop)


SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np, optax
from flax import nnx
import lockstep

def drawn(key, shape, dtype, *_, **__):  # XLA would compile each draw for seconds
    return jax.numpy.asarray(np.random.default_rng(shape).standard_normal(shape) / 10, dtype)

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(97, 97, kernel_init=drawn, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(97, 10, kernel_init=drawn, rngs=rngs)
    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))

generator = np.random.Generator(np.random.PCG64(1))
x, y = generator.standard_normal((20000, 97), np.float32), generator.integers(0, 10, 20000)
model = Net(nnx.Rngs(0))
kept = jax.numpy.arange(3.0)  # an array of the script's own, from before the devices were made
trainer = lockstep.wrap(model, optax.adam(1e-2), "cross_entropy", devices={devices})
digests = []
for size in (20000, 61):  # the product of many examples is where XLA's threads show in the bits
    trainer.step((x[:size], y[:size]))
    digests.append(trainer.digest())
assert float((kept + model.last.bias[0]).sum()) != 0
assert len(trainer.devices) == {devices}
print(json.dumps([digests, np.array(model(x[:2])).shape]))
"""


def fresh(devices, environment):
    script = SCRIPT.format(devices=devices, tests=__file__.rpartition("/parity")[0])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    digests, shape = json.loads(done.stdout.splitlines()[-1])
    assert shape == [2, 10]
    return digests


def test_a_fresh_process_for_each_number_of_devices(scripted):
    """A script that says nothing of devices but their number, with a model that has woken JAX already."""
    assert fresh(1, scripted) == fresh(3, scripted)


@pytest.fixture
def scripted():
    """The environment of a script: nothing of what these tests have set."""
    import os

    return {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
