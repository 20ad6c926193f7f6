"""The reference backend's own words, and its dropout."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense, DenseCrossEntropy
from lockstep.core.batches import OBJECTIVE_EXAMPLE
from lockstep.errors import BatchError, ModelError, OptimizerError

X, Y = np.eye(4), np.arange(4)


@pytest.mark.parametrize(
    ("optimizer", "loss", "error", "message"),
    [
        (
            None,
            "mse",
            OptimizerError,
            "The optimizer of a Dense must be a lockstep.backends.numpy.SGD. Got None. Use for example SGD(0.1).",
        ),
        (
            SGD(0.1),
            "hinge",
            ModelError,
            "loss='hinge' is not a loss of a Dense. Use 'cross_entropy', 'mse', or a DenseCrossEntropy or "
            "DenseSquaredError of lockstep.backends.numpy.",
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
        ((X, Y + 1), "Labels must be from 0 to 3. Got 4. Fix the labels, or give the model's last layer more outputs."),
        (
            (X, Y, 1),
            "There must be one example weight per example. Got weights of shape () for a shard of 4 examples. "
            "Give a vector with one number for each example of the batch.",
        ),
        (
            {"x": X},
            "The batch {'x': ndarray(4, 4)} cannot be used with a loss of (outputs, targets). Give (inputs, targets) "
            f"or (inputs, targets, weights), or write an objective:\n{OBJECTIVE_EXAMPLE}",
        ),
    ],
)
def test_batches(batch, message):
    with lockstep.wrap(Dense([4, 4], seed=0), SGD(0.1), DenseCrossEntropy(), devices=1) as trainer:
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
