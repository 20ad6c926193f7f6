"""Keras on PyTorch: what worker processes get. `test_other_backends.py` runs this file, on PyTorch only."""

import threading

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 40)


def create_custom_model():
    """Returns a model with functions and classes that workers cannot import and that are not registered in Keras."""
    keras.utils.set_random_seed(4)

    def bent(x):
        return ops.where(x > 0, x, 0.1 * x)

    def small(shape, dtype=None):
        return 0.1 * keras.random.normal(shape, dtype=dtype, seed=3)

    class Ridge(keras.regularizers.Regularizer):
        def __call__(self, weights):
            return 0.01 * ops.sum(weights**2)

        def get_config(self):
            return {}

    @keras.saving.register_keras_serializable("scripts")
    class Twice(layers.Layer):
        def call(self, x):
            return 2.0 * x

    class Jitter(layers.Layer):
        """Uses random numbers in evaluation mode, too, from torch's own generator, as recurrent layers do."""

        def __init__(self, **options):
            super().__init__(**options)
            self.generator = keras.random.SeedGenerator()

        def call(self, x):
            return keras.random.dropout(x, 0.3, seed=self.generator)

    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        """Without a configuration, as many scripts write it."""

        def __init__(self, first):
            self.first = first

        def __call__(self, step):
            return self.first * 0.5 ** ops.cast(step, "float32")

    class Share(keras.metrics.Metric):
        def __init__(self, wanted):
            super().__init__(name="share")
            self.wanted = wanted
            self.total, self.count = (self.add_weight(name=name, initializer="zeros") for name in ("total", "count"))

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(ops.sum(ops.cast(ops.argmax(y_pred, 1) == self.wanted, "float32")))
            self.count.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

        def result(self):
            return self.total / self.count

    def entropy(y_true, y_pred):
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))

    def scaled(factor):
        def bent(x):  # one more of this name
            return factor * bent_most(x)

        return bent

    bent_most = bent
    dense = layers.Dense(8, activation=scaled(0.9), kernel_initializer=small, kernel_regularizer=Ridge())
    stack = [
        dense,
        layers.BatchNormalization(),
        Jitter(),
        Twice(),
        layers.Lambda(lambda x: ops.tanh(x)),
        layers.Dense(3, bent),
    ]
    model = keras.Sequential([keras.Input((6,)), *stack])
    model.compile(keras.optimizers.SGD(Halving(0.1), momentum=0.9), entropy, metrics=[Share(1)])
    return model


def test_workers_have_the_script_s_functions_and_its_later_changes():
    def digests(devices):
        model = create_custom_model()
        with lockstep.wrap(model, devices=devices, shards=4) as trainer:
            assert len(trainer.devices) == devices
            found = [dict(trainer.step((X, Y))), trainer.digest()]
            for layer in model.layers[:2]:
                layer.trainable = False
            found += [dict(trainer.step((X, Y))), trainer.digest()]
            trainer.close()  # the next step starts new workers
            found += [dict(trainer.step((X, Y))), trainer.digest()]
            model.layers[0].trainable = True
            found += [dict(trainer.step((X, Y))), trainer.digest()]
            momentum = next(each for each in model.optimizer.variables if each.name.endswith("momentum"))
            momentum.assign(ops.ones(momentum.shape))
            found += [dict(trainer.step((X, Y))), trainer.digest()]
            return found

    one, two = digests(1), digests(2)
    assert one[0]["share"] > 0
    assert two == one


def test_workers_have_the_script_s_names_and_metrics():
    keras.utils.set_random_seed(4)
    start = keras.Input((6,))
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.BatchNormalization()])
    model = keras.Model(start, layers.Dense(3)(inner(start)))
    metrics = [keras.metrics.SparseTopKCategoricalAccuracy(2), keras.metrics.SparseCategoricalAccuracy()]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    with lockstep.wrap(model, devices=2, shards=2) as trainer:
        trainer.step((X, Y))
        model.set_weights([np.ones_like(weight) for weight in model.get_weights()])  # goes to the worker by name
        trainer.step((X, Y))
        assert "model.sequential/dense/kernel" in trainer.digests()


class Nested(layers.Layer):
    """Creates layers itself, which take dtypes and the image format from defaults that no configuration contains."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.pool = layers.Dense(6, activation="relu"), layers.GlobalMaxPooling2D()

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.pool(ops.reshape(self.inner(x), (-1, 2, 3, 1)))


@pytest.fixture
def defaults():
    """Sets unusual defaults of Keras, and a policy that does not follow from them."""
    config = keras.config
    before = config.dtype_policy(), config.floatx(), config.epsilon(), config.image_data_format()
    config.set_dtype_policy("float32")
    config.set_floatx("float64")
    config.set_epsilon(0.2)
    config.set_image_data_format("channels_first" if before[-1] == "channels_last" else "channels_last")
    yield
    config.set_dtype_policy(before[0])
    config.set_floatx(before[1])
    config.set_epsilon(before[2])
    config.set_image_data_format(before[3])


def test_workers_have_keras_s_defaults_weight_decay_exclusions_and_schedule_steps(defaults, tmp_path):
    def found(devices):
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((6,)), Nested(), layers.Dense(6), layers.Dense(3, "softmax")])
        rates = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        optimizer = keras.optimizers.AdamW(rates, weight_decay=0.5)
        optimizer.exclude_from_weight_decay([model.layers[1].kernel], ["bias"])
        model.compile(optimizer, "sparse_categorical_crossentropy")
        with lockstep.wrap(model, devices=devices, shards=4) as trainer:
            result = [trainer.step((X, Y))["loss"]]
            trainer.save(tmp_path / str(devices))
            result += [trainer.step((X, Y))["loss"] for _ in range(2)]
            trainer.restore(tmp_path / str(devices))
            return [*result, trainer.step((X, Y))["loss"], trainer.digest()]

    assert found(2) == found(1)


def test_a_checkpoint_holds_which_layers_are_frozen(tmp_path):
    def normed():
        keras.utils.set_random_seed(4)
        middle = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((6,)), *middle, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return lockstep.wrap(model, devices=1, shards=4, threads=1)

    batch = np.linspace(-1, 1, 96, dtype="float32").reshape(16, 6), np.arange(16) % 3
    one, two = normed(), normed()
    one.step(batch)
    one.model.layers[0].trainable = one.model.layers[1].trainable = False
    one.save(tmp_path / "saved")
    one.step(batch)
    two.restore(tmp_path / "saved")
    assert [layer.trainable for layer in two.model.layers] == [False, False, True]
    two.step(batch)
    assert two.digest() == one.digest()


class Block(layers.Layer):
    """A layer without `**options` and without a configuration, as in the examples of keras.io."""

    def __init__(self, units, rate=0.1):
        super().__init__()
        self.stack = keras.Sequential([layers.Dense(units, activation="relu"), layers.Dense(units)])
        self.norm, self.dropout = layers.LayerNormalization(), layers.Dropout(rate)

    def call(self, x, training=False):
        return self.norm(x + self.dropout(self.stack(x), training=training))


class Subclassed(keras.Model):
    """Holds layers in a dict, a model of its own, a function, a generator, and a number that is written later."""

    def __init__(self, activation):
        super().__init__()
        start = keras.Input((6,))
        self.inner = keras.Model(start, layers.Dense(3)(ops.tanh(start)))
        self.parts = {"block": Block(6), "rest": [layers.BatchNormalization(), layers.Dense(6, activation)]}
        self.seeds = keras.random.SeedGenerator(3)
        self.scale = 1.0

    def call(self, x, training=False):
        norm, dense = self.parts["rest"]
        x = self.inner(dense(norm(self.parts["block"](x, training=training), training=training)))
        return self.scale * (keras.random.dropout(x, 0.1, seed=self.seeds) if training else x)


def subclassed():
    model = Subclassed(lambda x: ops.tanh(x))
    model.scale = 2.0
    model(X[:2])
    return model


def deep():
    """More layers than Python calls may be deep."""
    start = keras.Input((6,))
    x = Block(6)(start)
    for _ in range(60):
        x = layers.Add()([x, layers.Dense(6, kernel_initializer="zeros")(x)])
    return keras.Model(start, layers.Dense(3)(x))


def without_configuration(make):
    keras.utils.set_random_seed(4)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize("make", [subclassed, deep])
def test_models_without_a_configuration_reach_a_worker(make):
    def run(devices):
        model = without_configuration(make)
        with lockstep.wrap(model, devices=["cpu"] * devices, shards=4) as trainer:
            history = trainer.fit((X, Y), batch_size=16, epochs=2, validation_data=(X, Y), verbose=0).history
            model.layers[-1].trainable = False
            model.set_weights([0.5 * weights for weights in model.get_weights()])
            trainer.step((X, Y))
            return history, trainer.digests(), trainer.predict(X).tobytes()

    assert run(2) == run(1)


def test_a_model_that_cannot_be_pickled_is_refused_when_it_is_wrapped():
    model = without_configuration(subclassed)
    model.parts["block"].lock = threading.Lock()  # no pickle can hold one
    message = (
        r"'subclassed.*' cannot be sent to a worker process.* because Subclassed, Block has no get_config.*Give .*"
    )
    with pytest.raises(lockstep.LockstepError, match=message):
        lockstep.wrap(model, devices=2, shards=4)


class Centered(layers.Layer):
    """Keeps a running mean in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.mean = ops.zeros((6,))

    def call(self, x):
        self.mean = 0.9 * self.mean + 0.1 * ops.mean(ops.stop_gradient(x), 0)
        return x - self.mean


class Recorded(layers.Layer):
    """Stores what it has computed in an attribute, and never reads it."""

    def call(self, x):
        self.seen = ops.tanh(x)
        return self.seen


def create_model_with(layer):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), layer(), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_tensor_that_a_layer_carries_from_shard_to_shard_in_an_attribute_is_refused():
    with lockstep.wrap(create_model_with(Centered), devices=1, shards=4) as trainer:
        before = trainer.digest()
        message = r"has left in 'mean' of Centered: .* Make it a weight of the layer: self\.add_weight\(shape"
        with pytest.raises(lockstep.LockstepError, match=message):
            trainer.step((X, Y))
        assert trainer.digest() == before


def test_a_tensor_that_a_layer_merely_leaves_in_an_attribute_is_not_refused():
    found = set()
    for devices in (1, 2):
        with lockstep.wrap(create_model_with(Recorded), devices=devices, shards=4) as trainer:
            for _ in range(3):
                trainer.step((X, Y))
            trainer.evaluate(X, Y, verbose=0)
            found.add(trainer.digest())
    assert len(found) == 1
