"""The MXNet scripts of `demo` and `verify`: Lockstep's, and the same with gluon's own Trainer for comparison."""

from lockstep.cli.scripts.base import Peer, Scripts

_TRAIN = """\
import sys

import mxnet as mx
from mxnet.gluon import loss, nn

import lockstep
from lockstep.datasets import digits

train, test = digits()
mx.random.seed(0)
net = nn.HybridSequential()
net.add(nn.Dense(128), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.2), nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
sgd = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
entropy = loss.SoftmaxCrossEntropyLoss()
trainer = lockstep.wrap(net, sgd, entropy, metrics=["accuracy"], devices=sys.argv[1:] or None)
history = trainer.fit(train, epochs=10, batch_size=256, validation_data=test)
history.to_csv("history.csv")
print(trainer.digest())
"""

# The same model, optimizer, batch and number of epochs, as gluon's users write it for several contexts.
_GLUON = """\
import csv
import hashlib
import sys
import time

import mxnet as mx
import numpy as np
from mxnet.gluon import Trainer, loss, nn, utils

from lockstep.datasets import digits

contexts = [mx.cpu(index) for index in range(int(sys.argv[1]))]
(x, y), (xt, yt) = digits()
mx.random.seed(0)
net = nn.HybridSequential()
net.add(nn.Dense(128), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.2), nn.Dense(10))
net.initialize(mx.init.Xavier(), ctx=contexts)
net.hybridize()
trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="device")
entropy = loss.SoftmaxCrossEntropyLoss()
rows = []
for epoch in range(10):
    started = time.perf_counter()
    order = np.random.default_rng(epoch).permutation(len(x))
    for index in np.split(order, range(256, len(x), 256)):
        parts = [utils.split_and_load(mx.nd.array(part[index]), contexts, even_split=False) for part in (x, y)]
        with mx.autograd.record():
            losses = [entropy(net(one), other) for one, other in zip(*parts)]
        for each in losses:
            each.backward()
        trainer.step(len(index))
    mx.nd.waitall()
    seconds = time.perf_counter() - started
    accuracy = float((net(mx.nd.array(xt)).asnumpy().argmax(1) == yt).mean())
    rows.append({"epoch": epoch, "seconds": seconds, "val_accuracy": accuracy})
with open("history.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
digest = hashlib.sha256()
for parameter in net.collect_params().values():
    digest.update(parameter.data(contexts[0]).asnumpy().tobytes())
print(digest.hexdigest())
"""

# What `lockstep verify` checks when it is given no script. Every parameter needs a shape before it.
_VERIFY = """\
import mxnet as mx
from mxnet.gluon import loss, nn

import lockstep
from lockstep.datasets import digits


def make_trainer(devices, shards):
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(
        nn.HybridLambda(lambda F, x: F.reshape(x, (-1, 1, 8, 8))),
        nn.Conv2D(6, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(2),
        nn.Conv2D(16, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(),
        nn.Dense(84, activation="relu"), nn.Dropout(0.25), nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 64)))
    adam = mx.optimizer.Adam(learning_rate=1e-3)
    return lockstep.wrap(net, adam, loss.SoftmaxCrossEntropyLoss(), devices=devices, shards=shards), digits()[0]
"""

SCRIPTS = Scripts("train_mxnet.py", _TRAIN, _VERIFY, Peer("gluon.Trainer", "contexts", "gluon.py", _GLUON))
