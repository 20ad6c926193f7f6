"""Changes of a model between steps, on each of Keras's backends; `test_other_backends.py` runs this file, too."""

from itertools import pairwise

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.backends import keras_optimizer_state
from lockstep.backends.keras.compiled import Compiled
from lockstep.errors import BatchError, ModelError

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 40)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BACKEND = keras.config.backend()


def made(*middle, rate=0.1):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(rate), LOSS)
    return model


def test_a_layer_without_weights_is_frozen():
    normal = layers.BatchNormalization(center=False, scale=False)
    with lockstep.wrap(made(normal), devices=1, shards=4) as trainer:
        means = [np.array(normal.moving_mean.numpy())]
        for flag in (True, False):
            normal.trainable = flag
            trainer.step((X, Y))
            means.append(np.array(normal.moving_mean.numpy()))
    moved = [not np.array_equal(one, other) for one, other in pairwise(means)]
    assert moved == [True, False]


class Noise(layers.Layer):
    """Draws without a generator of its own."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


def test_draws_without_a_generator_follow_from_the_shard_and_the_step():
    def losses(steps):
        with lockstep.wrap(made(Noise(), rate=0.0), devices=1, shards=2) as trainer:
            return [trainer.step((X, Y))["loss"] for _ in range(steps)]

    if BACKEND == "jax":  # Keras itself refuses them there
        with pytest.raises(ValueError, match=r"self\.seed_generator = keras\.random\.SeedGenerator"):
            losses(1)
        return
    keras.utils.set_random_seed(1)
    before = losses(3)
    keras.utils.set_random_seed(2)
    assert losses(3) == before
    assert len(set(before)) == 3


def test_a_model_that_is_compiled_again_wants_another_trainer():
    model = made()
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        model.compile("adam", LOSS, metrics=["accuracy"])
        for call in (trainer.step, trainer.evaluate, lambda batch: trainer.predict(X)):
            with pytest.raises(ModelError, match=r"compiled again since. Call lockstep\.wrap\(model\) again"):
                call((X, Y))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        assert sorted(trainer.step((X, Y))) == ["accuracy", "loss"]


def test_a_model_with_another_layer_wants_another_trainer():
    model = made(layers.Dense(4))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        model.pop()
        model.add(layers.Dense(3))
        for call in (trainer.step, trainer.evaluate, lambda batch: trainer.predict(X)):
            with pytest.raises(
                ModelError,
                match=r"others since, or has them elsewhere. Compile it and call lockstep\.wrap\(model\) again",
            ):
                call((X, Y))
    model.compile("sgd", LOSS)
    before = model.layers[-1].get_weights()[0]
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
    assert not np.array_equal(before, model.layers[-1].get_weights()[0])


class Branching(keras.Model):
    """Has layers without variables under names and in a list."""

    def __init__(self):
        super().__init__()
        self.last, self.one, self.other = layers.Dense(3), layers.Activation("relu"), layers.Activation("tanh")
        self.more = [layers.Rescaling(2.0), layers.Rescaling(1.0, offset=1.0)]

    def call(self, x):
        for layer in self.more:
            x = layer(x)
        return self.last(self.one(x)) + self.other(x)[:, :3]


def _swap(model):
    model.one, model.other = model.other, model.one


def _replace_in_a_list(model):
    model.more[0] = layers.Rescaling(3.0)


def _swap_in_a_list(model):
    model.more.reverse()


@pytest.mark.parametrize("change", [_swap, _replace_in_a_list, _swap_in_a_list])
def test_layers_without_variables(change):
    def wrapped():
        return lockstep.wrap(model, devices=1, shards=2)

    keras.utils.set_random_seed(4)
    model = Branching()
    model.compile("sgd", LOSS)
    model(X[:1])
    with wrapped() as trainer:
        for call in (trainer.step, trainer.evaluate, trainer.step):
            call((X, Y))
        change(model)
        for call in (trainer.step, trainer.evaluate, lambda batch: trainer.predict(X)):
            with pytest.raises(ModelError, match=r"A trainer trains the layers and variables .* others since, or has"):
                call((X, Y))
    model.compile("sgd", LOSS)
    with wrapped() as trainer:
        np.testing.assert_allclose(trainer.predict(X), model.predict(X, verbose=0), rtol=1e-4, atol=1e-6)


def test_another_layer_without_variables_in_a_sequence():
    model = made(layers.Dense(4), layers.Activation("relu"))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        last = model.pop()
        model.pop()
        model.add(layers.Activation("tanh"))
        model.add(last)
        with pytest.raises(
            ModelError, match=r"others since, or has them elsewhere. Compile it and call lockstep\.wrap"
        ):
            trainer.step((X, Y))


class Holding(layers.Layer):
    """Has a layer that it did not make."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, x):
        return self.held(x)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_flags_of_a_shared_layer(frozen):
    def compiled():
        held = layers.Dense(6)
        return Compiled(made(Holding(held), Holding(held)), LOSS)

    here, there = compiled(), compiled()
    here.model.layers[frozen].trainable = False
    here.model.layers[0].held.trainable = True
    here.model.layers[0].held.bias.trainable = False
    there.set_trainable(here.trainable())
    assert there.trainable() == here.trainable()
    assert len(set(here.trainable())) == 2


def test_optimizer_state_follows_its_weights_in_any_order():
    layer, namesake = (layers.Dense(6, name="dense") for _ in range(2))
    for each in (layer, namesake):
        each.build((6,))
    optimizer = keras.optimizers.Adam()
    optimizer.build([layer.kernel, namesake.kernel, namesake.bias])
    weights = {"kernel": layer.kernel, "bias": layer.bias, "kernel.2": namesake.kernel, "bias.3": namesake.bias}
    turned = dict(reversed(weights.items()))
    found, again = (
        {name: id(slot) for name, slot in keras_optimizer_state.name_variables(optimizer, each).items()}
        for each in (weights, turned)
    )
    assert found == again
    assert [id(each) for each in optimizer._momentums] == [
        found[f"{name}.momentum"] for name in ("kernel", "kernel.2", "bias.3")
    ]


class Measuring(keras.Model):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")


class Computing(keras.Model):
    def compute_metrics(self, *parts, **more):
        return {}


class Predicting(keras.Model):
    def predict_step(self, data):
        return 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Measuring, r"Metrics come from compile.*'seen', which the model keeps itself.*return loss, {'seen': value}"),
        (Computing, r"Metrics come from compile.*compute_metrics of its own. Use compile\(metrics"),
        (Predicting, r"trainer\.predict calls the model. Got a model with a predict_step of its own"),
    ],
)
def test_callbacks_with_unsupported_methods_are_refused(kind, message):
    with pytest.raises(ModelError, match=message):
        lockstep.wrap(kind(), "sgd", "mse")


def test_a_loss_needs_a_function_and_targets():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd")
    with pytest.raises(
        ModelError, match=r"Training needs a loss.*compiled without one.*model\.compile\(optimizer, loss"
    ):
        lockstep.wrap(model, devices=1, shards=2).step((X, Y))
    with pytest.raises(BatchError, match=r"A loss compares outputs with targets.*Give \(inputs, targets\)"):
        lockstep.wrap(made(), devices=1, shards=2).step(X)


class Penalty(layers.Layer):
    """Adds a loss, and only in training."""

    def call(self, x, training=False):
        if training:
            self.add_loss(keras.ops.mean(x**2))
        return x


def test_a_loss_may_come_from_a_layer_and_only_in_training():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Penalty()])
    model.compile("sgd")
    expected = (model.predict(X, verbose=0) ** 2).mean()
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        assert trainer.step(X)["loss"] == pytest.approx(expected, rel=1e-5)
        assert trainer.step(X)["loss"] < expected


class Waiting(keras.Model):
    """Has no variables before it is called with two inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(3)

    def call(self, inputs):
        left, right = inputs
        return self.last(self.first(left) + self.first(right))


def test_a_model_that_waits_for_its_first_batch(tmp_path):
    def wrapped():
        keras.utils.set_random_seed(4)
        model = Waiting()
        model.compile("sgd", LOSS)
        return lockstep.wrap(model, devices=1, shards=2)

    waits = (
        r"A model has its variables when.*waits for its first batch.*keras\.Input\(shape\), or call it on an example"
    )
    if BACKEND == "torch":
        with pytest.raises(ModelError, match=waits):
            wrapped()
        return
    batch = ((X, X), Y)
    with wrapped() as trainer:
        assert trainer.predict((X, X)).shape == (40, 3)
        first = trainer.step(batch)["loss"]
    with wrapped() as trainer:
        trainer.learning_rates = (0.5,)
        assert trainer.step(batch)["loss"] == pytest.approx(first)
        assert trainer.learning_rates == (0.5,)
        trainer.save(tmp_path)
    with wrapped() as trainer:
        with pytest.raises(ModelError, match=waits):
            trainer.restore(tmp_path)
        assert trainer.evaluate(batch)["loss"] == pytest.approx(first)
        trainer.restore(tmp_path)
        assert trainer.num_steps == 1
