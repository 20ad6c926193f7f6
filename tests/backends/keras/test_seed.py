"""The run's seed is Keras's or, without one, the framework's."""

import keras
import numpy as np
import pytest

import lockstep
from lockstep.backends import keras as home

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = np.arange(64) % 3
WEIGHT = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")


@pytest.fixture(autouse=True)
def seeds_as_before():
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute("global_random_seed")
    yield
    global_state.set_global_attribute("global_random_seed", before)


def digest(seed, dropout, shuffle):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(dropout, seed=4), keras.layers.Dense(3)])
    model.layers[-1].set_weights([WEIGHT, np.zeros(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with lockstep.wrap(model, keras.optimizers.SGD(0.1), loss, devices=1, shards=2) as trainer:
        trainer.fit((X, Y), batch_size=16, shuffle=shuffle, verbose=0)
        assert trainer.opening.endswith(f"seed {seed}")
        return trainer.digests()


@pytest.mark.parametrize(("dropout", "shuffle"), [(0.5, False), (0.0, True)], ids=["dropout", "order"])
def test_the_run_depends_on_kerass_seed(dropout, shuffle):
    found = [digest(seed, dropout, shuffle) for seed in (0, 1, 1)]
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("seed", [0, -7, 2**40])
def test_the_seed_is_that_of_keras(seed):
    keras.utils.set_random_seed(seed % 2**32)  # which seeds numpy too
    keras.src.backend.common.global_state.set_global_attribute("global_random_seed", seed)
    assert home.initial_seed() == seed


def test_without_a_keras_seed_it_is_the_frameworks():
    keras.src.backend.common.global_state.set_global_attribute("global_random_seed", None)
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        for seed in (3, -7, 2**70):
            tf.random.set_seed(seed)
            assert home.initial_seed() == seed
        tf.random.set_seed(0)
    elif keras.config.backend() == "torch":
        import torch

        torch.manual_seed(3)
        assert home.initial_seed() == 3
    else:
        assert home.initial_seed() == 0
