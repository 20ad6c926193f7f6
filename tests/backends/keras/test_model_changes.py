"""Changes of a model between steps, on each framework: `test_other_backends.py` also runs this file."""

from itertools import pairwise

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.backends import keras_optimizer_state
from lockstep.backends.keras.stateless_model import CompiledModel
from lockstep.errors import BatchError, ModelError

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 40)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BACKEND = keras.config.backend()


def create_model(*middle, rate=0.1):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(rate), LOSS)
    return model


def test_freezing_a_layer_without_weights_stops_its_statistics():
    normal = layers.BatchNormalization(center=False, scale=False)
    with lockstep.wrap(create_model(normal), devices=1, shards=4) as trainer:
        means = [np.array(normal.moving_mean.numpy())]
        for flag in (True, False):
            normal.trainable = flag
            trainer.step((X, Y))
            means.append(np.array(normal.moving_mean.numpy()))
    changed = [not np.array_equal(one, other) for one, other in pairwise(means)]
    assert changed == [True, False]


def test_a_layer_with_weights_may_be_frozen_between_steps_except_on_jax():
    model = create_model(layers.Dense(6, name="first"))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        before = np.array(model.layers[0].kernel.numpy())
        model.layers[0].trainable = False
        if BACKEND == "jax":
            with pytest.raises(
                ModelError, match=r"^The variable 'first/bias' was frozen .* Call lockstep\.wrap\(model\)"
            ):
                trainer.step((X, Y))
            return
        trainer.step((X, Y))
    assert np.array_equal(model.layers[0].kernel.numpy(), before)


class Noise(layers.Layer):
    """Uses random numbers without a generator of its own."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


def test_random_operations_without_a_generator_follow_from_the_shard_and_the_step():
    def losses(steps):
        with lockstep.wrap(create_model(Noise(), rate=0.0), devices=1, shards=2) as trainer:
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


def test_a_model_that_is_compiled_again_is_refused():
    model = create_model()
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        model.compile("adam", LOSS, metrics=["accuracy"])
        for call in (trainer.step, trainer.evaluate, lambda batch: trainer.predict(X)):
            with pytest.raises(ModelError, match=r"compiled again since it .* Call lockstep\.wrap\(model\) again"):
                call((X, Y))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        assert sorted(trainer.step((X, Y))) == ["accuracy", "loss"]


def test_a_model_whose_layers_have_changed_is_refused():
    model = create_model(layers.Dense(4))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        model.pop()
        model.add(layers.Dense(3))
        for call in (trainer.step, trainer.evaluate, lambda batch: trainer.predict(X)):
            with pytest.raises(
                ModelError,
                match=r"removed or moved since it was wrapped.* Compile the model and call lockstep\.wrap\(model",
            ):
                call((X, Y))
    model.compile("sgd", LOSS)
    before = model.layers[-1].get_weights()[0]
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
    assert not np.array_equal(before, model.layers[-1].get_weights()[0])


class Branching(keras.Model):
    """Has layers without variables, as attributes and in a list."""

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
def test_a_model_whose_layers_without_variables_have_changed_is_refused(change):
    def wrap_model():
        return lockstep.wrap(model, devices=1, shards=2)

    keras.utils.set_random_seed(4)
    model = Branching()
    model.compile("sgd", LOSS)
    model(X[:1])
    with wrap_model() as trainer:
        for call in (trainer.step, trainer.evaluate, trainer.step):
            call((X, Y))
        change(model)
        for call in (trainer.step, trainer.evaluate, lambda batch: trainer.predict(X)):
            with pytest.raises(ModelError, match=r"Layers or variables of the model were added, removed or moved"):
                call((X, Y))
    model.compile("sgd", LOSS)
    with wrap_model() as trainer:
        np.testing.assert_allclose(trainer.predict(X), model.predict(X, verbose=0), rtol=1e-4, atol=1e-6)


def test_a_sequential_whose_layers_without_variables_have_changed_is_refused():
    model = create_model(layers.Dense(4), layers.Activation("relu"))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        last = model.pop()
        model.pop()
        model.add(layers.Activation("tanh"))
        model.add(last)
        with pytest.raises(ModelError, match=r"removed or moved since .* Compile the model and call lockstep"):
            trainer.step((X, Y))


class Holding(layers.Layer):
    """Has a layer that was created outside of it."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, x):
        return self.held(x)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_flags_of_a_shared_layer(frozen):
    def compiled():
        held = layers.Dense(6)
        return CompiledModel(create_model(Holding(held), Holding(held)), LOSS)

    here, there = compiled(), compiled()
    here.model.layers[frozen].trainable = False
    here.model.layers[0].held.trainable = True
    here.model.layers[0].held.bias.trainable = False
    flags = here.read_trainable_flags()
    there.write_trainable_flags(flags)
    assert there.read_trainable_flags() == flags
    assert len(set(flags)) == 2


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
        (Measuring, r"The metric 'seen' is an attribute of the model.*return loss, {'seen': value}"),
        (Computing, r"Computing defines compute_metrics, which Lockstep does not call.* Use compile\(metrics"),
        (Predicting, r"Predicting defines predict_step, which Lockstep does not call.*trainer\.predict returns"),
    ],
)
def test_models_with_unsupported_methods_are_refused(kind, message):
    with pytest.raises(ModelError, match=message):
        lockstep.wrap(kind(), "sgd", "mse")


def test_a_missing_loss_and_missing_targets_are_refused():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd")
    with pytest.raises(
        ModelError, match=r"Training needs a loss, but .* compiled without a loss.*model\.compile\(optimizer, loss"
    ):
        lockstep.wrap(model, devices=1, shards=2).step((X, Y))
    with pytest.raises(BatchError, match=r"The loss needs targets, but .* inputs alone\. Give \(inputs, targets\)"):
        lockstep.wrap(create_model(), devices=1, shards=2).step(X)


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


def test_a_model_without_variables_before_its_first_batch(tmp_path):
    def wrap_model():
        keras.utils.set_random_seed(4)
        model = Waiting()
        model.compile("sgd", LOSS)
        return lockstep.wrap(model, devices=1, shards=2)

    waits = r"needs the model's variables, but .* has none before its first batch.*keras\.Input\(shape\), or call it on"
    if BACKEND == "torch":
        with pytest.raises(ModelError, match=waits):
            wrap_model()
        return
    batch = ((X, X), Y)
    with wrap_model() as trainer:
        assert trainer.predict((X, X)).shape == (40, 3)
        first = trainer.step(batch)["loss"]
    with wrap_model() as trainer:
        trainer.learning_rates = (0.5,)
        assert trainer.step(batch)["loss"] == pytest.approx(first)
        assert trainer.learning_rates == (0.5,)
        trainer.save(tmp_path)
    with wrap_model() as trainer:
        with pytest.raises(ModelError, match=waits):
            trainer.restore(tmp_path)
        assert trainer.evaluate(batch)["loss"] == pytest.approx(first)
        trainer.restore(tmp_path)
        assert trainer.num_steps == 1
