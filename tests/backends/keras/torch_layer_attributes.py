"""Keras on PyTorch: numbers and containers of layers. Run by `test_other_backends.py`, on PyTorch alone."""

from collections import OrderedDict

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32") + 1
Y = GENERATOR.integers(0, 3, 40)


class Layer(layers.Layer):
    def __init__(self):
        super().__init__(name="mine")
        self.prepare()

    def prepare(self):
        pass


class Counting(Layer):
    def prepare(self):
        self.passes = 0

    def call(self, x):
        self.passes += 1
        return x * (1 + 0.01 * self.passes)


class CountingInDict(Layer):
    def prepare(self):
        self.stats = {"passes": 0}

    def call(self, x):
        self.stats["passes"] += 1
        return x * (1 + 0.01 * self.stats["passes"])


class CountingInNestedDict(Layer):
    def prepare(self):
        self.stats = {"all": {"passes": 0}}

    def call(self, x):
        self.stats["all"]["passes"] += 1
        return x * (1 + 0.01 * self.stats["all"]["passes"])


class CountingInList(Layer):
    def prepare(self):
        self.stats = [0]

    def call(self, x):
        self.stats[0] += 1
        return x * (1 + 0.01 * self.stats[0])


class CountingInEvaluation(Layer):
    """No training pass reads it."""

    def prepare(self):
        self.stats = {"passes": 0}

    def call(self, x, training=False):
        if not training:
            return x * (1 + 0.01 * self.stats["passes"])
        self.stats["passes"] += 1
        return x


class GrowingList(Layer):
    def prepare(self):
        self.means = []

    def call(self, x):
        self.means.append(float(ops.mean(ops.stop_gradient(x))))
        return x - sum(self.means)


class GrowingSet(Layer):
    def prepare(self):
        self.seen = set()

    def call(self, x):
        self.seen.add(len(self.seen))
        return x * (1 + 0.01 * len(self.seen))


class MeanInDict(Layer):
    def prepare(self):
        self.stats = {"mean": ops.zeros((6,))}

    def call(self, x):
        self.stats["mean"] = 0.9 * self.stats["mean"] + 0.1 * ops.mean(ops.stop_gradient(x), 0)
        return x - self.stats["mean"]


class MeanInOrderedDict(MeanInDict):
    def prepare(self):
        self.stats = OrderedDict(mean=ops.zeros((6,)))


class MeanInList(Layer):
    def prepare(self):
        self.stats = [ops.zeros((6,))]

    def call(self, x):
        self.stats[0] = 0.9 * self.stats[0] + 0.1 * ops.mean(ops.stop_gradient(x), 0)
        return x - self.stats[0]


def wrap_model(layer, devices):
    keras.utils.set_random_seed(4)
    rest = [layers.BatchNormalization(), layers.Dropout(0.1), layers.Reshape((2, 3)), layers.LSTM(5), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), layer(), *rest])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return lockstep.wrap(model, devices=devices, shards=4, threads=1)


STATEFUL = [
    (Counting, "'passes' of Counting"),
    (CountingInDict, "'passes' of 'stats' of CountingInDict"),
    (CountingInNestedDict, "'passes' of 'all' of 'stats' of CountingInNestedDict"),
    (CountingInList, "'stats' of CountingInList"),
    (CountingInEvaluation, "'passes' of 'stats' of CountingInEvaluation"),
    (GrowingList, "'means' of GrowingList"),
    (GrowingSet, "'seen' of GrowingSet"),
    (MeanInDict, "'mean' of 'stats' of MeanInDict"),
    (MeanInOrderedDict, "'mean' of 'stats' of MeanInOrderedDict"),
    (MeanInList, "'stats' of MeanInList"),
]


@pytest.mark.parametrize(("layer", "where"), STATEFUL)
def test_attributes_that_carry_values_from_shard_to_shard_are_refused(layer, where):
    with wrap_model(layer, 1) as trainer:
        before = trainer.digest()
        with pytest.raises(lockstep.LockstepError) as caught:
            trainer.step((X, Y))
        assert f"has left in {where}: " in str(caught.value)
        assert "Make it a weight of the layer: self.add_weight(" in str(caught.value)
        assert trainer.digest() == before


def test_they_are_refused_on_two_devices():
    with wrap_model(CountingInDict, 2) as trainer:
        assert len(trainer.devices) == 2
        with pytest.raises(lockstep.LockstepError, match="has left in 'passes' of"):
            trainer.step((X, Y))


class CountingInWeight(Layer):
    """Counts in a weight, as the error message proposes."""

    def build(self, shape):
        self.passes = self.add_weight((), "zeros", dtype="int32", trainable=False, name="passes")

    def call(self, x, training=False):
        if training:
            self.passes.assign_add(1)
        return x * (1 + 0.01 * ops.cast(self.passes, "float32"))


class Holding(Layer):
    """Has layers, seeds and weights in containers, and attributes that are the same for every shard."""

    def prepare(self):
        self.width, self.sizes, self.tables = 0, {"width": 0}, {}
        self.parts = {"dense": layers.Dense(6), "norms": [layers.BatchNormalization(), layers.LayerNormalization()]}
        self.seeds = [keras.random.SeedGenerator(3)]
        self.kinds = {"tanh"}

    def build(self, shape):
        self.parts["dense"].build(shape)
        for norm in self.parts["norms"]:
            norm.build(shape)
        self.scales = [self.add_weight((6,), "ones", name="scale")]

    def call(self, x, training=False):
        self.width = self.sizes["width"] = x.shape[1]
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = np.cos(np.arange(6, dtype="float32"))
        self.tables["inputs"] = x  # never read
        self.add_loss(0.01 * ops.mean(x**2))
        x = self.parts["dense"](x) * ops.convert_to_tensor(self.tables[x.shape[1]]) * self.scales[0]
        for norm in self.parts["norms"]:
            x = norm(x, training=training)
        return keras.random.dropout(x, 0.1, seed=self.seeds[0]) if training else x


@pytest.mark.parametrize("layer", [CountingInWeight, Holding])
def test_attributes_that_carry_nothing_and_weights_are_not_refused(layer):
    found = []
    for devices in (1, 2):
        with wrap_model(layer, devices) as trainer:
            assert len(trainer.devices) == devices
            names = [weight.path for weight in trainer.model.weights]
            rows = [dict(trainer.step((X[:size], Y[:size]))) for size in (40, 40, 24, 40)]
            rows.append(trainer.evaluate(X, Y, verbose=0))
            history = trainer.fit((X, Y), batch_size=20, epochs=2, validation_data=(X, Y), verbose=0).history
            assert [weight.path for weight in trainer.model.weights] == names
            found.append((rows, history, trainer.digest(), trainer.predict(X).tobytes()))
    assert found[0] == found[1]
