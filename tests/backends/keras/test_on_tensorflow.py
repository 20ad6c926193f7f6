"""Keras on TensorFlow: training, arguments and errors."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.backends.tensorflow.loaders import DatasetSource
from lockstep.errors import (
    BatchError,
    CallbackError,
    ExactError,
    ModelError,
    NonFiniteError,
    OptimizerError,
    PlanError,
)

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((50, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 50)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def create_model(*middle, units=3, compiled=True, optimizer=None, **options):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), *middle, layers.Dense(units)])
    if compiled:
        model.compile(optimizer or keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"], **options)
    return model


def digest_after(devices, make, batch=(X, Y), steps=3):
    model = make()
    with lockstep.wrap(model, devices=devices, shards=4) as trainer:
        assert len(trainer.devices) == devices
        for _ in range(steps):
            trainer.step(batch)
        return trainer.digest()


def schedule():
    rates = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return create_model(optimizer=keras.optimizers.SGD(rates, clipnorm=0.1))


def averaged():
    return create_model(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, global_clipnorm=0.1))


def float16():
    keras.utils.set_random_seed(4)
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, dtype=policy), layers.BatchNormalization(dtype=policy), layers.Dense(3)]
    )
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), LOSS)
    return model


def bfloat16():
    policy = keras.DTypePolicy("mixed_bfloat16")
    return create_model(layers.Dense(8, dtype=policy), layers.Dropout(0.4))


@pytest.mark.parametrize("make", [schedule, averaged, float16, bfloat16])
def test_other_optimizers_and_precisions_give_the_bits_of_one_device(make):
    assert digest_after(3, make) == digest_after(1, make)


def test_verify_on_other_numbers_of_devices():
    with lockstep.wrap(create_model(layers.Dropout(0.3)), devices=2, shards=4) as trainer:
        before = trainer.digest()
        found = trainer.verify((X, Y), steps=2, devices=(1, 3, 4), batch_size=16)
        assert found.equal
        assert sorted(found.digests) == [1, 3, 4]
        assert trainer.digest() == before


def test_a_schedule_determines_the_rate():
    with lockstep.wrap(schedule(), devices=1, shards=2) as trainer:
        trainer.step((X, Y))
        assert trainer.learning_rates[0] == pytest.approx(0.05)


def test_clipping_uses_the_gradient_of_the_whole_batch():
    model = create_model(optimizer=keras.optimizers.SGD(1.0))
    before = model.get_weights()
    with lockstep.wrap(model, devices=2, shards=4, clip_norm=1e-3) as trainer:
        trainer.step((X, Y))
    moved = sum(((one - other) ** 2).sum() for one, other in zip(before, model.get_weights(), strict=True)) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("shards", [1, 4])
def test_activity_regularization_is_that_of_the_whole_batch(shards):
    def regular():
        keras.utils.set_random_seed(4)
        stack = [keras.Input((6,)), layers.Dense(8, activity_regularizer="l2"), layers.Dense(3)]
        return keras.Sequential(stack)

    plain, own = regular(), regular()
    with tf.GradientTape() as tape:
        loss = LOSS(Y, plain(X)) + sum(plain.losses)
    gradients = tape.gradient(loss, [variable.value for variable in plain.trainable_variables])
    before = own.get_weights()
    with lockstep.wrap(own, keras.optimizers.SGD(1.0), LOSS, devices=1, shards=shards) as trainer:
        assert trainer.step((X, Y))["loss"] == pytest.approx(float(loss), rel=1e-5)
    for old, new, gradient in zip(before, own.get_weights(), gradients, strict=True):
        np.testing.assert_allclose(old - new, gradient, rtol=1e-4, atol=1e-5)


def test_frozen_layers_do_not_change():
    model = create_model()
    model.layers[0].trainable = False
    with lockstep.wrap(model, devices=2, shards=4) as trainer:
        frozen = model.layers[0].get_weights()[0].copy()
        trainer.step((X, Y))
        assert np.array_equal(model.layers[0].get_weights()[0], frozen)


def test_a_model_without_variables_before_its_first_batch():
    keras.utils.set_random_seed(4)
    model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)])
    model.compile("adam", LOSS, metrics=["accuracy"])
    with lockstep.wrap(model, devices=2, shards=4) as trainer:
        trainer.step((X, Y))
        assert len(trainer.state()) == 4 + 1 + 8


def test_names_do_not_depend_on_earlier_models():
    def names():
        with lockstep.wrap(create_model(layers.BatchNormalization()), devices=1, shards=1) as trainer:
            return sorted(trainer.state())

    assert names() == names()
    assert "model.dense_1/kernel" in names()


def test_a_resumed_checkpoint_has_the_same_bits(tmp_path):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=3).batch(16)

    def fitted(epochs, folder, devices=2):
        with lockstep.wrap(create_model(layers.Dropout(0.3)), devices=devices, shards=4) as trainer:
            source = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=3).batch(16)
            trainer.fit(source, epochs=epochs, checkpoint=str(folder), verbose=0)
            return trainer.digest()

    assert int(data.cardinality()) == 4
    whole = fitted(3, tmp_path / "whole")
    fitted(1, tmp_path / "parts")
    assert fitted(3, tmp_path / "parts", devices=3) == whole
    tf.random.set_seed(None)  # it would be the shuffle's too
    read = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=3).batch(16)
    for given, why in (
        (tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50).batch(16), r"no seed. Use shuffle\(..., seed=0\)"),
        (read, r"it was read 4 times already. Create the dataset again"),
    ):
        for _ in range(4 * (given is read)):
            iter(DatasetSource(read, 16).epoch(0))
        with (
            lockstep.wrap(create_model(layers.Dropout(0.3)), devices=1, shards=4) as trainer,
            pytest.raises(ExactError, match=why),
        ):
            trainer.fit(given, epochs=4, checkpoint=str(tmp_path / "parts"), verbose=0)


# -- arguments of fit


def test_progress_lines_are_those_of_keras(capsys):
    with lockstep.wrap(create_model(), devices=1, shards=1) as trainer:
        trainer.fit((X, Y), batch_size=25, epochs=2, verbose="auto")
    line = r"2/2 - \d+s - \d+(s|ms|us)/step - loss: [\d.]+ - accuracy: [\d.]+\n"
    assert re.search(rf"\nEpoch 1/2\n{line}Epoch 2/2\n{line}train acc", capsys.readouterr().out)


def test_unsupported_arguments_of_fit_are_explained():
    with lockstep.wrap(create_model(), devices=1, shards=1) as trainer:
        with pytest.raises(CallbackError, match=r"verbose must be 0, 1, 2 or 'auto'. Got verbose=3"):
            trainer.fit((X, Y), verbose=3)
        with pytest.raises(CallbackError, match=r"callbacks must be a list. Got EarlyStopping\(\). Use callbacks=\["):
            trainer.fit((X, Y), callbacks=keras.callbacks.EarlyStopping())
        with pytest.raises(
            BatchError, match=r"class_weight needs one example weight per example, but .* shape \(32, 2\)"
        ):
            trainer.fit((X, Y, np.ones((50, 2))), class_weight=dict.fromkeys(range(3), 1.0), verbose=0)
        assert trainer.num_steps == 0


# -- errors


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


def test_a_metric_that_is_no_sum_is_refused_by_name():
    model = create_model(compiled=False)
    model.compile("sgd", LOSS, metrics=[Largest()])
    with (
        lockstep.wrap(model, devices=1, shards=2) as trainer,
        pytest.raises(ModelError, match=r"The metric 'largest' \(Largest\) is not supported: its state must be a sum"),
    ):
        trainer.step((X, Y))


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(OptimizerError, match=r"Training needs an optimizer and a loss, but .*model\.compile"):
        lockstep.wrap(create_model(compiled=False))


def test_a_precision_is_refused():
    with pytest.raises(
        ModelError,
        match=r"precision='bf16' is not supported for .* Leave precision out, and call keras\.mixed_precision",
    ):
        lockstep.wrap(create_model(), precision="bf16")


def test_a_model_with_a_step_of_its_own_is_refused():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    with pytest.raises(ModelError, match=r"Own defines train_step, which .*Move the loss into compute_loss"):
        lockstep.wrap(Own(), "sgd", "mse")


def test_a_model_of_another_backend_is_refused(monkeypatch):
    model = create_model()
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(
        ModelError, match=r"was built on tensorflow, but Keras now runs on jax. Set KERAS_BACKEND=tensor"
    ):
        lockstep.wrap(model)


def test_a_loss_that_is_not_a_number_names_the_shard_and_changes_nothing():
    with lockstep.wrap(create_model(), devices=2, shards=4) as trainer:
        before = trainer.digest()
        weights = np.ones(len(X), "float32")
        weights[-1] = np.nan
        with pytest.raises(NonFiniteError, match=r"The loss is nan in step 0, shard 3"):
            trainer.step((X, Y, weights))
        assert trainer.digest() == before


def test_a_thread_count_that_tensorflow_does_not_have_is_refused():
    with (
        lockstep.wrap(create_model(), devices=1, shards=2, threads=97) as trainer,
        pytest.raises(PlanError, match=r"thread count can only be set before TensorFlow is initialized.*threads=97"),
    ):
        trainer.step((X, Y))
