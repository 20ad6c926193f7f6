"""Plain TensorFlow: a from-scratch LeNet with raw variables, the same bits after every step on 1 to 4 devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep.core import tree
from parity.runs import Case, compare, run

SHARDS = 4
GENERATOR = np.random.Generator(np.random.PCG64(11))


def batch(size):
    return GENERATOR.standard_normal((size, 28, 28, 1)).astype("float32"), GENERATOR.integers(0, 10, size)


STEPS = [batch(size) for size in (64, 61, 27, 3, 1)]
EPOCH = batch(131)
FORWARD = [(data, data[0]) for data in map(batch, (1, 5, 9))]


def lenet():
    generator = np.random.Generator(np.random.PCG64(12))

    def variable(*shape):
        return tf.Variable((generator.standard_normal(shape) * 0.1).astype("float32"))

    shapes = [(3, 3, 1, 20), (20,), (5, 5, 20, 50), (50,), (800, 128), (128,), (128, 10), (10,)]
    variables = [variable(*shape) for shape in shapes]

    def net(x, training, seed):
        w1, b1, w2, b2, w3, b3, w4, b4 = variables
        hidden = tf.nn.avg_pool2d(tf.nn.relu(tf.nn.conv2d(x, w1, 1, "VALID") + b1), 2, 2, "VALID")
        hidden = tf.nn.avg_pool2d(tf.nn.relu(tf.nn.conv2d(hidden, w2, 1, "VALID") + b2), 2, 2, "SAME")
        hidden = tf.nn.relu(tf.reshape(hidden, (x.shape[0], -1))[:, :800] @ w3 + b3)
        if training:
            hidden = tf.nn.experimental.stateless_dropout(hidden, 0.5, seed=seed)
        return hidden @ w4 + b4

    return net, variables


def programme(devices):
    model = lenet()
    optimizer = keras.optimizers.Adam(3e-3)
    with lockstep.wrap(
        model, optimizer, "cross_entropy", metrics=["accuracy"], devices=devices, shards=SHARDS
    ) as trainer:
        assert len(trainer.devices) == devices
        cases = [
            Case("LeNet from scratch, Adam", SHARDS, STEPS),
            Case("fit 131 examples, tail of 3", SHARDS, fit=(EPOCH, 64)),
            Case("evaluate, predict", SHARDS, forward=FORWARD),
        ]
        return [(case, run(trainer, case)) for case in cases]


@pytest.fixture(scope="module")
def reference():
    return programme(1)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_devices_give_the_bits_of_one(devices, reference, matrix):
    compare("tensorflow", programme(devices), reference, matrix)


def test_another_order_of_additions_gives_other_bits(reference, monkeypatch):
    """The control: were the sums not sensitive to their order, equal digests would say nothing."""
    monkeypatch.setattr(
        tree.Span,
        "halves",
        property(lambda node: (tree.Span(node.start, node.stop - 1), tree.Span(node.stop - 1, node.stop))),
    )
    tree._program.cache_clear()
    try:
        (_, changed), *_ = programme(1)
        assert changed.equal(reference[0][1]) == 0
    finally:
        tree._program.cache_clear()
