"""Float variables of a Keras model that are queues, which cannot be averaged over shards."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.random.Generator(np.random.PCG64(0)).standard_normal((24, 5)).astype("float32") + 1
Y = np.arange(24) % 3
ROWS = np.random.Generator(np.random.PCG64(1)).standard_normal((48, 5)).astype("float32")


@keras.saving.register_keras_serializable("lockstep_tests")
class Queue(layers.Layer):
    """Keeps the last examples, as MoCo does."""

    def build(self, shape):
        rows = keras.initializers.Constant(ROWS)
        self.queue = self.add_weight(name="queue", shape=(48, 5), initializer=rows, trainable=False)

    def call(self, x, training=False):
        outputs = x + ops.mean(self.queue)
        if training:
            self.enqueue(x)
        return outputs

    def enqueue(self, x):
        self.queue.assign(ops.concatenate([x, self.queue[x.shape[0] :]]))


@keras.saving.register_keras_serializable("lockstep_tests")
class Filled(Queue):
    """A queue that the script writes to."""

    def call(self, x, training=False):
        return x + ops.mean(self.queue)


@keras.saving.register_keras_serializable("lockstep_tests")
class Running(layers.Layer):
    """Means of the examples' parts, of which some never change and one is still 0."""

    def build(self, shape):
        self.means = self.add_weight(name="means", shape=(4, 5), initializer="zeros", trainable=False)
        self.table = self.add_weight(name="table", shape=(4, 5), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            mask = ops.convert_to_tensor([[1.0], [1.0], [1.0], [0.0]])
            self.means.assign(0.9 * self.means + 0.1 * mask * ops.mean(x, axis=0))
        return x + ops.mean(self.table)


def wrap_model(*middle, **options):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((5,)), *middle, layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return lockstep.wrap(model, **{"devices": 1, "shards": 4, **options})


def test_a_queue_is_refused():
    trainer = wrap_model(Queue(name="bank"))
    before = trainer.digest()
    with pytest.raises(ModelError) as caught:
        trainer.step((X, Y))
    assert "bank" in str(caught.value)
    assert (
        "of shape (48, 5) along axis 0 and leaves other slices unchanged, as in a queue or a memory bank. Lockstep "
        "averages float buffers over the shards, which would mix old and new slices. Update the buffer in the script"
    ) in str(caught.value)
    assert trainer.digest() == before


def test_with_one_shard_a_queue_is_trained_as_in_keras():
    trainer = wrap_model(Queue(name="bank"), shards=1)
    trainer.step((X, Y))
    queue = ops.convert_to_numpy(trainer.model.get_layer("bank").queue)
    assert np.array_equal(queue, np.concatenate([X, ROWS[24:]]))


def test_a_queue_that_the_script_fills_is_trained_with():
    trainer = wrap_model(Filled(name="bank"))
    for _ in range(3):
        trainer.step((X, Y))
        trainer.model.get_layer("bank").enqueue(X)
    queue = ops.convert_to_numpy(trainer.model.get_layer("bank").queue)
    assert np.array_equal(queue, np.concatenate([X, ROWS[24:]]))


def test_running_statistics_are_averaged():
    norm = layers.SpectralNormalization(layers.Dense(5))
    trainer = wrap_model(norm, layers.BatchNormalization(), Running(name="running"))
    for _ in range(5):
        trainer.step((X, Y))
    assert ops.convert_to_numpy(trainer.model.get_layer("running").means)[:3].all()
