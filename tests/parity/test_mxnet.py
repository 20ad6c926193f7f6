"""MXNet: the same bits after every step on 1, 2, 3, 4 and 8 contexts of one process."""

import contextlib

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import HybridBlock, nn

import lockstep
from lockstep.core import tree
from parity.runs import Case, compare, run

GENERATOR = np.random.Generator(np.random.PCG64(5))


def features(size):
    return GENERATOR.standard_normal((size, 97)).astype("float32"), GENERATOR.integers(0, 10, size)


def images(size):
    return GENERATOR.standard_normal((size, 1, 16, 16)).astype("float32"), GENERATOR.integers(0, 10, size)


def forward(data):
    return data, data[0]


def mlp():
    net = nn.HybridSequential()
    net.add(nn.Dense(33, activation="relu"), nn.Dense(17, activation="tanh"), nn.Dense(10))
    return net


def lenet():
    """Not hybridized, and without the shapes of its weights."""
    net = nn.Sequential()
    net.add(nn.Conv2D(6, 3, activation="relu"), nn.AvgPool2D(2, 2), nn.Conv2D(16, 3, activation="relu"))
    net.add(nn.Flatten(), nn.Dropout(0.4), nn.Dense(32, activation="relu"), nn.Dropout(0.5), nn.Dense(10))
    return net


class Residual(HybridBlock):
    """Two 3×3 convolutions and the way around them."""

    def __init__(self, channels, stride):
        super().__init__()
        self.body = nn.HybridSequential()
        self.body.add(nn.Conv2D(channels, 3, stride, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        self.body.add(nn.Conv2D(channels, 3, 1, 1, use_bias=False), nn.BatchNorm())
        self.around = nn.Conv2D(channels, 1, stride, use_bias=False)

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + self.around(x))


def resnet():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, 1, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    net.add(Residual(4, 1), Residual(8, 2), nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


STEPS = [features(size) for size in (256, 61, 27, 8, 5, 1)]  # uneven shards, then empty ones
PICTURES = [images(size) for size in (256, 61, 5)]
DECIDES_ON_8 = images(512)
FORWARD = [forward(features(size)) for size in (1, 2, 5, 9, 17)]

KINDS = {
    "MLP, SGD momentum": (mlp, True, ("sgd", {"learning_rate": 0.1, "momentum": 0.9}), STEPS),
    "LeNet dropout, Adam": (lenet, False, ("adam", {"learning_rate": 3e-3}), PICTURES),
    "ResNet batch norm, NAG": (resnet, True, ("nag", {"learning_rate": 0.05, "momentum": 0.9}), PICTURES),
}


def cases(kind, shards):
    batches = KINDS[kind][3]
    made = [Case(kind, shards, batches)]
    if batches is STEPS:
        made.append(Case("fit 1,003 examples, tail of 3", shards, fit=(EPOCH, 250)))
        made.append(Case("evaluate, predict", shards, forward=FORWARD))
    else:
        made.append(Case(f"evaluate, predict {kind}", shards, forward=[forward(PICTURES[1])]))
    return made


EPOCH = features(1003)


def trainer(kind, shards, devices):
    make, hybridized, optimizer, _ = KINDS[kind]
    mx.random.seed(7)
    net = make()
    net.initialize(mx.init.Xavier())
    if hybridized:
        net.hybridize()
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    return lockstep.wrap(net, optimizer, loss, metrics=["accuracy", "top5"], devices=devices, shards=shards)


def programme(kind, shards, devices):
    with trainer(kind, shards, devices) as wrapped:
        assert wrapped.devices == tuple(f"cpu:{index}" for index in range(devices))
        return [(case, run(wrapped, case)) for case in cases(kind, shards)]


@pytest.fixture(scope="module")
def references():
    return {(kind, shards): programme(kind, shards, 1) for kind in KINDS for shards in (4, 8)}


@pytest.mark.parametrize(
    ("kind", "shards", "devices"),
    [
        (kind, shards, devices)
        for kind in KINDS
        for shards, counts in ((4, (3,)), (8, (1, 2, 3, 4, 8)))
        for devices in counts
    ],
)
def test_contexts_give_the_bits_of_one(kind, shards, devices, references, matrix):
    compare("mxnet", programme(kind, shards, devices), references[kind, shards], matrix)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_no_argument_given(devices):
    """Nothing but the batch decides on shards, threads and seed."""
    with trainer("LeNet dropout, Adam", None, devices) as wrapped:
        wrapped.step(DECIDES_ON_8)
        assert wrapped.session.run.shards == 8
        digests.add(wrapped.digest())
    assert len(digests) == 1


digests = set()


def test_verify_moves_the_block_from_context_to_context():
    with trainer("ResNet batch norm, NAG", 8, 2) as wrapped:
        wrapped.step(PICTURES[1])
        before = wrapped.digest()
        assert wrapped.verify(PICTURES[0], steps=2, devices=(1, 3, 4), batch_size=64).equal
        assert wrapped.digest() == before


@contextlib.contextmanager
def from_left_to_right(monkeypatch):
    """Another order of additions."""
    tree._program.cache_clear()
    halves = property(lambda node: (tree.Span(node.start, node.stop - 1), tree.Span(node.stop - 1, node.stop)))
    with monkeypatch.context() as patch:
        patch.setattr(tree.Span, "halves", halves)
        yield
    tree._program.cache_clear()


def test_another_order_of_additions_gives_other_bits(references, monkeypatch):
    """The control: were the sums not sensitive to their order, equal digests would say nothing."""
    with from_left_to_right(monkeypatch):
        for (kind, shards), reference in references.items():
            (_, changed), *_ = programme(kind, shards, 1)
            assert changed.equal(reference[0][1]) == 0
