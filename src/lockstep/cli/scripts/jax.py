"""The JAX scripts of `demo` and `verify`: Lockstep's, and the same with one `jit` over all devices for comparison."""

from lockstep.cli.scripts.base import Peer, Scripts

_TRAIN = """\
import sys

import optax
from flax import nnx

import lockstep
from lockstep.datasets import digits

train, test = digits()
rngs = nnx.Rngs(0)
dense, last = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
net = nnx.Sequential(dense, nnx.BatchNorm(128, momentum=0.9, rngs=rngs), nnx.relu, nnx.Dropout(0.2, rngs=rngs), last)
loss = optax.softmax_cross_entropy_with_integer_labels
trainer = lockstep.wrap(net, optax.sgd(0.1, 0.9), loss, metrics=["accuracy"], devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
"""

# The same model, optimizer, batch and number of epochs. The last examples that do not fill the devices are left out.
_SHARDED = """\
import csv
import hashlib
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.datasets import digits

world = int(sys.argv[1])
jax.config.update("jax_num_cpu_devices", world)
mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:world]), ("batch",))
whole, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
(x, y), (xt, yt) = digits()
rngs = nnx.Rngs(0)
dense, last = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
net = nnx.Sequential(dense, nnx.BatchNorm(128, momentum=0.9, rngs=rngs), nnx.relu, nnx.Dropout(0.2, rngs=rngs), last)
optimizer = nnx.Optimizer(net, optax.sgd(0.1, 0.9), wrt=nnx.Param)
loss = optax.softmax_cross_entropy_with_integer_labels
for part in (net, optimizer):
    nnx.update(part, jax.device_put(nnx.state(part), whole))


@nnx.jit
def step(net, optimizer, x, y):
    gradients = nnx.grad(lambda net: loss(net(x), y).mean())(net)
    optimizer.update(net, gradients)


rows = []
for epoch in range(10):
    started = time.perf_counter()
    net.train()
    order = np.random.default_rng(epoch).permutation(len(x))
    for index in np.split(order, range(256, len(x), 256)):
        index = index[: len(index) // world * world]
        step(net, optimizer, *jax.device_put((x[index], y[index]), spread))
    jax.block_until_ready(nnx.state(net))
    seconds = time.perf_counter() - started
    net.eval()
    accuracy = float((net(xt).argmax(1) == yt).mean())
    rows.append({"epoch": epoch, "seconds": seconds, "val_accuracy": accuracy})
with open("history.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
digest = hashlib.sha256()
for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state((net, optimizer)))):
    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        digest.update(np.asarray(leaf).tobytes())
print(digest.hexdigest())
"""

# What `lockstep verify` checks when it is given no script.
_VERIFY = """\
import optax
from flax import linen as nn

import lockstep
from lockstep.datasets import digits


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.reshape(-1, 8, 8, 1)
        for width, padding in ((6, "SAME"), (16, "VALID")):
            x = nn.relu(nn.BatchNorm(not train)(nn.Conv(width, (3, 3), padding=padding)(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(84)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.25, deterministic=not train)(x))


def make_trainer(devices, shards):
    loss = optax.softmax_cross_entropy_with_integer_labels
    trainer = lockstep.wrap(Net(), optax.adam(1e-3), loss, devices=devices, shards=shards)
    return trainer, digits()[0]
"""

SCRIPTS = Scripts("train_jax.py", _TRAIN, _VERIFY, Peer("NamedSharding", "devices", "sharded.py", _SHARDED))
