"""Small gluon networks and batches, the same in every test."""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

import lockstep

GENERATOR = np.random.Generator(np.random.PCG64(6))
X = GENERATOR.standard_normal((61, 1, 12, 12)).astype("float32")
Y = GENERATOR.integers(0, 10, 61)
BATCH = (X, Y)
SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})


def net(norm=True, dropout=0.0, hybridized=False):
    """A convolution and two dense layers that learn their shapes from the first batch."""
    mx.random.seed(3)
    made = nn.HybridSequential()
    made.add(nn.Conv2D(4, 3, activation="relu"))
    if norm:
        made.add(nn.BatchNorm())
    made.add(nn.Flatten(), nn.Dense(16, activation="relu"))
    if dropout:
        made.add(nn.Dropout(dropout))
    made.add(nn.Dense(10))
    made.initialize(mx.init.Xavier())
    if hybridized:
        made.hybridize()
    return made


def loss():
    return mx.gluon.loss.SoftmaxCrossEntropyLoss()


def weights(block):
    """A copy of every parameter, by the name it is saved under."""
    return {name: each.data().asnumpy() for name, each in block._collect_params_with_prefix().items()}


def same(one, other):
    """Whether two such copies hold the same bytes."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def wrapped(block, optimizer=SGD, criterion=None, devices=1, **options):
    options = {"shards": 8, "threads": 1, **options}
    return lockstep.wrap(block, optimizer, loss() if criterion is None else criterion, devices=devices, **options)
