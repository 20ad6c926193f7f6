"""The reference backend's own words, and its dropout."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, CrossEntropy, Dense
from lockstep.backends.numpy.backend import NumpyBackend
from lockstep.core.batches import OBJECTIVE_EXAMPLE
from lockstep.errors import BatchError, ModelError, OptimizerError

X, Y = np.eye(4), np.arange(4)


@pytest.mark.parametrize(
    ("optimizer", "loss", "error", "message"),
    [
        (None, "mse", OptimizerError, "A Dense goes with lockstep.backends.numpy.SGD. Got None."),
        (
            SGD(0.1),
            "hinge",
            ModelError,
            "A Dense's loss is 'cross_entropy', 'mse' or an object of theirs. Got 'hinge'.",
        ),
    ],
)
def test_combinations_that_do_not_fit_a_dense_network_are_refused(optimizer, loss, error, message):
    with pytest.raises(error) as caught:
        lockstep.wrap(Dense([4, 4], seed=0), optimizer, loss, devices=1)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, Y + 1), "Labels run from 0 to 3. Got 4. Fix the labels, or give the model's last layer more outputs."),
        (
            (X, Y, 1),
            "There is one weight per example. Got weights of shape () for a shard of 4. "
            "Give one number for each example.",
        ),
        (
            {"x": X},
            "With a loss of (outputs, targets) a batch is (inputs, targets) or (inputs, targets, weights). "
            "Got {'x': ndarray(4, 4)}. "
            f"Give one of these, or write an objective:\n{OBJECTIVE_EXAMPLE}",
        ),
    ],
)
def test_batches(batch, message):
    with lockstep.wrap(Dense([4, 4], seed=0), SGD(0.1), CrossEntropy(), devices=1) as trainer:
        with pytest.raises(BatchError) as caught:
            trainer.step(batch)
        assert str(caught.value) == message


def test_dropout_scales_what_it_keeps():
    model = Dense([4, 1000, 2], seed=0, dropout=0.25)
    values = model.forward(X[:1], np.random.Generator(np.random.PCG64(0)))[1]
    plain = model.forward(X[:1], None)[1]
    kept = values != 0
    np.testing.assert_allclose(values[kept], plain[kept] / 0.75)
    assert 0.7 < kept.sum() / (plain != 0).sum() < 0.8


def test_shards_out_of_order_stop_the_step(monkeypatch):
    """A defect of a backend, which would silently add in another order."""
    leaves = NumpyBackend.leaves
    monkeypatch.setattr(NumpyBackend, "leaves", lambda *arguments: (each for each in reversed([*leaves(*arguments)])))
    x, y = np.ones((8, 3)), np.arange(8) % 2
    with (
        lockstep.wrap(Dense([3, 2], seed=0), SGD(0.1), "cross_entropy", devices=1, shards=4) as trainer,
        pytest.raises(AssertionError, match="shard 3 came in the place of shard 0"),
    ):
        trainer.step((x, y), verbose=0)
