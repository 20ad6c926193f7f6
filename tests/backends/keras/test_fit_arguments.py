"""The arguments of fit, evaluate and predict do what they do in Keras."""

import re

import keras
import numpy as np
import pytest

import lockstep

GENERATOR = np.random.Generator(np.random.PCG64(0))
X = GENERATOR.standard_normal((50, 8)).astype("float32")
Y = GENERATOR.integers(0, 3, 50)
W = GENERATOR.random(50).astype("float32")


def create_model(**compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss, **{"metrics": ["accuracy"], **compiled})
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validation_split": 0.3},
        {"sample_weight": W, "validation_split": 0.3},
        {"class_weight": {1: 3.0}},
        {"validation_data": (X[:20], Y[:20], W[:20]), "validation_batch_size": 20},
        {"validation_data": (X, Y), "validation_batch_size": 10, "validation_steps": 2},
        {"initial_epoch": 2},
    ],
    ids=lambda options: " ".join(options) or "x, y",
)
def test_fit_gives_the_history_of_keras(options):
    """The values differ by rounding: Lockstep's step is not traced as one function."""
    options = {"epochs": 4, "batch_size": 10, "shuffle": False, "verbose": 0, **options}
    expected = create_model().fit(X, Y, **options)
    with lockstep.wrap(create_model(), devices=1, shards=1) as trainer:
        found = trainer.fit(X, Y, **options)
    assert found.epoch == expected.epoch
    assert set(found.history) == set(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("freq", [2, [1, 4]])
def test_validation_freq_is_that_of_keras(freq):
    options = {"epochs": 4, "shuffle": False, "verbose": 0, "validation_split": 0.3, "validation_freq": freq}
    expected = create_model().fit(X, Y, **options).history["val_loss"]
    with lockstep.wrap(create_model(), devices=1, shards=1) as trainer:
        found = trainer.fit(X, Y, **options)["val_loss"]
    np.testing.assert_allclose([value for value in found if value == value], expected, rtol=2e-4)


@pytest.mark.parametrize("compiled", [{}, {"metrics": []}], ids=["metrics", "loss alone"])
def test_evaluate_gives_the_scores_of_keras(compiled, capsys):
    model = create_model(**compiled)
    expected = model.evaluate(X, Y, verbose=0)
    named = model.evaluate(X, Y, sample_weight=W, batch_size=10, steps=2, verbose=0, return_dict=True)
    with lockstep.wrap(model, devices=1, shards=1) as trainer:
        scores = trainer.evaluate(X, Y, verbose=0)
        if compiled:
            assert scores == [pytest.approx(expected, rel=1e-5)]
        else:
            loss, accuracy = scores
            assert [loss, accuracy] == pytest.approx(expected, rel=1e-5)
            assert scores[1] == scores["accuracy"] == accuracy
        options = {"sample_weight": W, "batch_size": 10, "steps": 2}
        assert trainer.evaluate(X, Y, return_dict=True, verbose=0, **options) == pytest.approx(named, rel=1e-5)
        assert trainer.predict(X, batch_size=10, steps=2, verbose=0).shape == (20, 3)
        assert capsys.readouterr().out == ""
        trainer.evaluate(X, Y)
        trainer.predict(X)
    line = r"2/2 - \d+s - \d+(s|ms|us)/step"
    metric = "" if compiled else r" - accuracy: [\d.]+"
    assert re.fullmatch(rf"{line} - loss: [\d.]+{metric}\n{line}\n", capsys.readouterr().out)


def test_integers_beside_class_weights_are_sample_weights():
    """A third entry is nothing else in Keras."""
    options = {"class_weight": {1: 3.0}, "batch_size": 10, "shuffle": False, "verbose": 0}
    with (
        lockstep.wrap(create_model(), devices=1, shards=1) as one,
        lockstep.wrap(create_model(), devices=1, shards=1) as other,
    ):
        one.fit((X, Y, np.arange(50)), **options)
        other.fit((X, Y, np.arange(50).astype("float64")), **options)
        assert one.digest() == other.digest()
