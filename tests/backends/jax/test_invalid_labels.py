"""Labels outside the classes, for which JAX silently uses other labels."""

import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from lockstep.errors import BatchError

X = np.eye(8, dtype="float32")
Y = np.arange(8) % 4


def wrapped(loss, shards):
    return lockstep.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss, shards=shards)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("loss", ["cross_entropy", optax.softmax_cross_entropy_with_integer_labels])
@pytest.mark.parametrize("label", [4, -1])
def test_labels_outside_the_classes_are_refused_and_change_nothing(loss, shards, label):
    wrong = np.where(np.arange(8) == 5, label, Y)
    with wrapped(loss, shards) as trainer:
        before = trainer.digest()
        for call in (trainer.step, trainer.evaluate):
            with pytest.raises(BatchError, match=rf"Labels must be from 0 to 3\. Got {label}\. Fix the labels"):
                call((X, wrong))
        assert trainer.digest() == before
        trainer.step((X, Y))
        with pytest.raises(BatchError, match="Labels must be from 0 to 3"):
            trainer.step((X, wrong))
        assert trainer.num_steps == 1
