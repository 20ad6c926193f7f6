"""Keras's conventions, on each framework: `test_other_backends.py` runs this file on JAX and on PyTorch."""

import re

import h5py  # noqa: F401  # Keras imports it while it works, and it sets a variable of the process
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import BatchError, ModelError, StateError

# Keras's own arrays, under numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = np.random.Generator(np.random.PCG64(8))
X = GENERATOR.standard_normal((40, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 40)
PLAIN = {"batch_size": 16, "shuffle": False, "verbose": 0}


@pytest.fixture(autouse=True)
def single_precision():
    before = keras.config.floatx()
    keras.config.set_floatx("float32")
    yield
    keras.config.set_floatx(before)


def create_model(*middle, optimizer=None, **options):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(3, **options)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def two_outputs():
    keras.utils.set_random_seed(4)
    start = keras.Input((6,))
    outputs = {"kind": layers.Dense(3, name="kind")(start), "size": layers.Dense(1, name="size")(start)}
    model = keras.Model(start, outputs)
    kinds = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    losses, metrics = {"kind": kinds, "size": "mse"}, {"kind": ["accuracy"], "size": ["mae"]}
    model.compile("sgd", losses, loss_weights={"kind": 1.0, "size": 0.3}, metrics=metrics)
    return model


def test_losses_that_are_sums_and_means_are_refused():
    model = two_outputs()
    kinds = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile("sgd", {"kind": kinds, "size": "mse"})
    message = r"have the reductions 'sum', 'sum_over_batch_size', but .* Use reduction='sum_over_batch_size'"
    with lockstep.wrap(model, devices=1, shards=4) as trainer, pytest.raises(ModelError, match=message):
        trainer.step((X[:32], {"kind": Y[:32], "size": X[:32, :1]}))


class Batches(keras.utils.PyDataset):
    """The batches of 16, by index."""

    ended = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        part = slice(16 * index, 16 * index + 16)
        return X[part], Y[part]

    def on_epoch_end(self):
        self.ended += 1


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def regular():
    keras.utils.set_random_seed(4)
    return create_model(layers.Dense(8, activation="relu", kernel_regularizer="l2"), layers.BatchNormalization())


def averaged():
    return create_model(optimizer=keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.8))


# Keras averages the losses of several outputs over batches, however short: there all have one size.
@pytest.mark.parametrize(
    ("make", "data", "more"),
    [
        (regular, (X, Y), {}),
        (create_model, (X, Y), {"class_weight": {0: 1.0, 1: 5.0, 2: 0.5}}),
        (averaged, (X, Y), {}),
        (two_outputs, (X[:32], {"kind": Y[:32], "size": X[:32, :1]}), {}),
    ],
    ids=["regularized and normalized", "class weights", "averaged weights", "two outputs"],
)
def test_one_device_and_one_shard_give_the_history_of_keras(make, data, more):
    plain, own = make(), make()
    expected = plain.fit(*data, epochs=2, validation_data=data, **PLAIN, **more)
    with lockstep.wrap(own, devices=1, shards=1) as trainer:
        found = trainer.fit(data, epochs=2, validation_data=data, **PLAIN, **more)
    assert_near(found.history, expected.history)
    for one, other in zip(own.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def two_by_two():
    keras.utils.set_random_seed(4)
    left, right = keras.Input((6,)), keras.Input((6,))
    kind = layers.Dense(3, name="kind")(layers.Concatenate()([left, right]))
    model = keras.Model([left, right], [kind, layers.Dense(1, name="size")(kind)])
    model.compile("sgd", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"])
    return model


@pytest.mark.parametrize("size", [32, 2])  # also as many examples as there are inputs
def test_a_list_of_arrays_is_several_inputs_or_outputs_as_in_keras(size):
    x, y = [X[:size], -X[:size]], [Y[:size], X[:size, :1]]
    model = two_by_two()
    rows, loss = model.predict(x, verbose=0), model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        for found in (trainer.predict(x), trainer(x), trainer.predict(tuple(x)), trainer.predict(iter([(x, y)]))):
            for one, other in zip(found, rows, strict=True):
                np.testing.assert_allclose(ops.convert_to_numpy(one), other, rtol=1e-5, atol=1e-5)
        for targets in (y, dict(zip(("kind", "size"), y, strict=True))):
            assert trainer.evaluate((x, targets))["loss"] == pytest.approx(loss, rel=1e-5)
        history = trainer.fit((x, y), batch_size=size, shuffle=False, validation_data=(x, y), verbose=0)
        assert history.history["loss"] == pytest.approx([loss], rel=1e-5)
        assert trainer.evaluate((x, y), return_dict=True) == {
            name.removeprefix("val_"): values[0] for name, values in history.history.items() if name.startswith("val_")
        }


def test_a_list_with_one_array_is_one_input():
    with lockstep.wrap(create_model(), devices=1, shards=2) as trainer:
        np.testing.assert_array_equal(trainer.predict([X]), trainer.predict(X))
        np.testing.assert_array_equal(*(ops.convert_to_numpy(trainer(given)) for given in ([X], X)))


def test_several_inputs_for_a_model_of_one_are_refused():
    """A Sequential would ignore all but the first."""
    with lockstep.wrap(create_model(), devices=1, shards=2) as trainer:
        for call in (lambda: trainer.predict([X, X]), lambda: trainer([X, X]), lambda: trainer.step(((X, X), Y))):
            with pytest.raises(
                BatchError, match=r"has one input. Got \(.*, 6\)\). Give one array, or an iterator for several batches"
            ):
                call()
        assert len(trainer.predict(iter([X, X]))) == 2 * len(X)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_regularization_counts_once_for_any_number_of_shards(reduction):
    model = create_model(layers.Dense(8, kernel_regularizer="l2"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile("sgd", loss)
    plain = float(ops.convert_to_numpy(loss(Y, model(X)) + sum(model.losses)))
    assert all(ops.convert_to_numpy(each) > 1e-3 for each in model.losses)
    with lockstep.wrap(model, devices=1, shards=4) as trainer:
        assert trainer.evaluate((X, Y), batch_size=40)["loss"] == pytest.approx(plain, rel=1e-5)
        assert trainer.step((X, Y))["loss"] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(("option", "longest"), [("global_clipnorm", 1e-3), ("clipnorm", 2**0.5 * 1e-3)])
def test_clipping_uses_the_gradient_of_the_whole_batch(option, longest):
    model = create_model(optimizer=keras.optimizers.SGD(1.0, **{option: 1e-3}))
    before = model.get_weights()
    with lockstep.wrap(model, devices=1, shards=4) as trainer:
        trainer.step((X, Y))
    moved = sum(((one - other) ** 2).sum() for one, other in zip(before, model.get_weights(), strict=True)) ** 0.5
    assert moved == pytest.approx(longest, rel=1e-3)


def test_bfloat16_layers_frozen_layers_and_a_file_of_the_model(tmp_path):
    frozen = layers.Dense(8, dtype=keras.DTypePolicy("mixed_bfloat16"))
    frozen.trainable = False
    model = create_model(frozen, layers.Dropout(0.4), layers.BatchNormalization())
    before = frozen.get_weights()[0]
    with lockstep.wrap(model, devices=1, shards=4) as trainer:
        assert trainer.model is model
        trainer.step((X, Y))
        assert np.array_equal(frozen.get_weights()[0], before)
        assert int(ops.convert_to_numpy(model.optimizer.iterations.value)) == 1
        model.save(tmp_path / "x.keras")
        again = keras.models.load_model(tmp_path / "x.keras")
        np.testing.assert_allclose(again.predict(X, verbose=0), trainer.predict(X), rtol=1e-5, atol=1e-6)


class Writing(keras.callbacks.Callback):
    """A callback that sets every weight to 1 after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        assert self.params["epochs"] == 5
        if epoch == 0:
            self.model.set_weights([np.ones_like(weight) for weight in self.model.get_weights()])


def test_fit_resumes_from_the_newest_checkpoint_with_keras_callbacks(tmp_path, capsys):
    def fitted(epochs, folder, callbacks=(), verbose=0):
        with lockstep.wrap(create_model(layers.Dropout(0.3)), devices=1, shards=4) as trainer:
            where = str(tmp_path / folder)
            options = {"batch_size": 16, "checkpoint": where, "verbose": verbose, "callbacks": list(callbacks)}
            history = trainer.fit((X, Y), epochs=epochs, **options)
            return trainer.digest(), history, trainer.learning_rates[0]

    whole, *_ = fitted(2, "whole")
    fitted(1, "parts")
    again, *_ = fitted(2, "parts", verbose="auto")
    assert again == whole
    line = r"Epoch 2/2\n3/3 - \d+s - \d+(s|ms|us)/step - loss: [\d.]+ - accuracy: [\d.]+\n"
    assert re.search(line, capsys.readouterr().out)

    stopping = keras.callbacks.EarlyStopping("loss", min_delta=100.0, patience=3, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, min_delta=100.0, patience=1)
    written, history, rate = fitted(5, "stopped", [stopping, plateau, Writing()])
    assert len(history.epoch) == 4
    assert rate == pytest.approx(1e-5)
    assert history.history["loss"][1] == pytest.approx(np.log(3), abs=0.02)  # of equal weights
    assert written != whole


def test_a_py_dataset_gives_the_bits_of_arrays():
    data = Batches()

    def digest(given, **options):
        with lockstep.wrap(create_model(), devices=1, shards=4) as trainer:
            trainer.fit(given, epochs=2, **options)
            return trainer.digest()

    alone = {name: value for name, value in PLAIN.items() if name != "batch_size"}  # a PyDataset has its own batch size
    assert digest(data, **alone) == digest((X, Y), **PLAIN)
    assert data.ended == 1


@pytest.mark.skipif(keras.config.backend() == "tensorflow", reason="TensorFlow's step multiplies by the scale")
def test_a_loss_scale_is_refused():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, loss_scale_factor=128.0), "mse")
    with pytest.raises(lockstep.LockstepError, match="has a loss scale, which Lockstep does not support"):
        lockstep.wrap(model)


def half_model(path):
    keras.utils.set_random_seed(4)
    stack = [layers.Dense(8, "relu"), layers.Dense(3, dtype="float32")]
    return keras.Sequential([keras.Input((6,)), *stack])


def half_by_name(path):
    model = half_model(path)
    model.compile("adam", HALF_LOSS)
    return model, ()


def half_by_class(path):
    model = half_model(path)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), HALF_LOSS)
    return model, ()


def half_built(path):
    model, _ = half_by_class(path)
    model.optimizer.build(model.trainable_variables)
    return model, ()


def half_given_to_wrap(path):
    return half_model(path), ("adam", HALF_LOSS)


def half_from_a_file(path):
    model, _ = half_built(path)
    model.save(path / "half.keras")
    return keras.models.load_model(path / "half.keras"), ()


HALF_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
HALVES = [half_by_name, half_by_class, half_built, half_given_to_wrap, half_from_a_file]


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.skipif(keras.config.backend() == "tensorflow", reason="TensorFlow's step multiplies by the scale")
@pytest.mark.parametrize("make", HALVES)
def test_float16_with_a_loss_scale_is_refused_before_anything_is_built(make, mixed_float16, tmp_path):
    model, given = make(tmp_path)
    with pytest.raises(lockstep.LockstepError, match=r"The optimizer LossScaleOptimizer has a loss scale, .* Call"):
        lockstep.wrap(model, *given)


def test_float16_without_a_loss_scale_trains(mixed_float16):
    model = half_model(None)
    model.compile(keras.optimizers.SGD(0.1), HALF_LOSS, auto_scale_loss=False)
    with lockstep.wrap(model, metrics=["accuracy"], devices=1, shards=4) as trainer:
        assert isinstance(trainer.model.optimizer, keras.optimizers.SGD)  # metrics compile the model again
        losses = trainer.fit((X, Y), epochs=3, **PLAIN).history["loss"]
        assert losses[2] < losses[0]


def drawing_model():
    """Returns a model with two outputs, running statistics and dropout."""
    keras.utils.set_random_seed(4)
    start = keras.Input((6,))
    middle = layers.Dropout(0.3)(layers.BatchNormalization()(layers.Dense(8)(start)))
    return keras.Model(start, [layers.Dense(6)(middle), layers.Dense(2)(middle)])


@lockstep.objective
def rebuilding(model, data):
    rebuilt, code = model(data)
    loss = ops.mean(ops.square(rebuilt - data))
    return loss, {"code": ops.mean(code), "mine": loss}


@pytest.mark.parametrize("compiled", [False, True])
def test_an_objective_trains_and_gives_its_own_metrics(compiled):
    def run(devices):
        model = drawing_model()
        given = None if compiled else keras.optimizers.Adam(0.01)
        if compiled:
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[["mae"], ["mae"]])
        with lockstep.wrap(model, given, rebuilding, devices=devices, shards=4) as trainer:
            history = trainer.fit(X, epochs=2, validation_data=X, **PLAIN).history
            assert len(trainer.predict(X)) == 2
            assert trainer.evaluate(X, return_dict=True) == {
                name: history[f"val_{name}"][-1] for name in ("loss", "code", "mine")
            }
            assert history["loss"] == history["mine"]
            statistics = model.layers[2].get_weights()[2:]
            assert not np.allclose(statistics[0], 0.0)
            assert not np.allclose(statistics[1], 1.0)
            return history, trainer.digest()

    one = run(1)
    assert sorted(one[0]) == ["code", "loss", "mine", "val_code", "val_loss", "val_mine"]
    assert run(["cpu"] * (3 if compiled else 2)) == one


def test_metrics_beside_an_objective_are_refused():
    with pytest.raises(lockstep.LockstepError, match=r"^metrics=\['mae'\] cannot be used with an objective: metrics"):
        lockstep.wrap(drawing_model(), keras.optimizers.Adam(), rebuilding, metrics=["mae"])


def test_ignored_targets_do_not_count():
    def create_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
        model.compile(keras.optimizers.SGD(1.0), loss)
        return model

    plain, model = create_model(), create_model()
    expected = plain.train_on_batch(X, Y)
    logs = lockstep.wrap(model, shards=4).step((X, Y))
    assert logs["loss"] == pytest.approx(float(np.ravel(expected)[0]), abs=1e-5)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_weights_of_both_signs_may_cancel_in_a_shard():
    """Keras returns 0 as the mean of such a shard."""
    weights = np.where(np.arange(40) % 2, -1.0, 1.0)
    weights[-1] = 1.0
    assert [part.sum() for part in np.split(weights, 4)] == [0, 0, 0, 2]

    def create_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, kernel_regularizer="l2")])
        reduction = "mean_with_sample_weight"
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile(keras.optimizers.SGD(0.1), loss, loss_weights=[0.5])
        return model

    plain, model = create_model(), create_model()
    expected = plain.train_on_batch(X, Y, weights)
    with lockstep.wrap(model, devices=1, shards=4) as trainer:
        assert trainer.step((X, Y, weights))["loss"] == pytest.approx(float(np.ravel(expected)[0]), rel=1e-4)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("kind", ["shape", "dtype", "missing", "extra"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(part, kind):
    with lockstep.wrap(create_model(layers.Dense(8)), devices=1, shards=2) as trainer:
        trainer.step((X, Y), verbose=0)
        before, state = trainer.digest(), trainer.state()
        name = next(name for name, array in state.items() if name.startswith(f"{part}.") and array.data.ndim == 2)
        short, array = re.escape(repr(name.partition(".")[2])), state[name]
        bad = {key: each._replace(data=np.asarray(each.data + 1)) for key, each in state.items() if key != name}
        if kind == "shape":
            bad[name] = array._replace(data=array.data[:, 1:])
            message = rf"{short} is \(6, 7\) in the checkpoint and \(6, 8\) in the {part}\."
        elif kind == "dtype":
            bad[name] = array._replace(data=array.data.astype("float64"), dtype="float64")
            message = f"{short} is float64 in the checkpoint and float32 in the {part}."
        elif kind == "missing":
            message = f"{short} is missing from the checkpoint."
        else:
            bad |= {name: array, f"{name}x": array}
            message = f"{short[:-1]}x' is not in the {part}."
        with pytest.raises(StateError, match=f"^The checkpoint does not fit this {part}: {message}"):
            trainer.load_state(bad)
        assert trainer.digest() == before


@pytest.mark.skipif(keras.config.backend() != "jax", reason="the kernels of TensorFlow and PyTorch refuse such labels")
def test_labels_without_weight_may_be_out_of_range():
    """Padded targets: by a weight of 0, or by the mask of an embedding."""
    labels, weights = Y.copy(), np.ones(len(Y), "float32")
    labels[3], weights[3] = -1, 0
    with lockstep.wrap(create_model(), devices=1, shards=2) as trainer:
        assert np.isfinite(trainer.step((X, labels, weights), verbose=0)["loss"])
        with pytest.raises(lockstep.LockstepError, match=r"Labels must be from 0 to 2\. Got -1"):
            trainer.step((X, labels), verbose=0)

    keras.utils.set_random_seed(1)
    words = np.tile(np.array([1, 2, 3, 0, 0]), (8, 1))
    targets = np.where(words == 0, -1, words % 3)
    model = keras.Sequential([keras.Input((5,)), layers.Embedding(4, 6, mask_zero=True), layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with lockstep.wrap(model, devices=1, shards=2) as trainer:
        assert np.isfinite(trainer.step((words, targets), verbose=0)["loss"])
