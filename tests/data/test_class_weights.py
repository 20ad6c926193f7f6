"""Class weights act as example weights; targets without a class are refused."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.data import arrays, stream
from lockstep.data.class_weights import ClassWeights
from lockstep.errors import BatchError, LockstepError

X = np.random.Generator(np.random.PCG64(0)).standard_normal((11, 4))
Y = np.arange(11) % 3
WEIGHTS = {0: 0.5, np.int64(1): 2.0, 2: 7}
EACH = np.array([0.5, 2.0, 7.0])[Y]


def digest(data, class_weight=None, devices=1):
    with lockstep.wrap(Dense([4, 3], seed=1), SGD(0.5), "cross_entropy", devices=devices, shards=4) as trainer:
        size = None if isinstance(data, list) else 4  # batches have their own
        trainer.fit(data, epochs=2, batch_size=size, shuffle=False, class_weight=class_weight, verbose=0)
        return trainer.digest()


def batches(*parts):
    return [tuple(part[start : start + 4] for part in parts) for start in (0, 4, 8)]


@pytest.mark.parametrize(
    ("data", "weighted"),
    [
        ((X, Y), (X, Y, EACH)),
        ((X, Y, EACH), (X, Y, EACH * EACH)),
        (arrays(X, Y), (X, Y, EACH)),
        (stream(list(zip(X, Y, strict=True))), (X, Y, EACH)),
        (batches(X, Y), (X, Y, EACH)),
    ],
    ids=["arrays", "arrays with weights", "a pipeline", "a stream", "batches"],
)
def test_class_weights_act_as_example_weights(data, weighted):
    expected = digest(weighted)
    assert digest(data, WEIGHTS) == expected
    assert digest(data) != expected


def test_class_weights_with_workers():
    assert digest(arrays(X, Y).map(lambda x, y: (x, y)), WEIGHTS, devices=2) == digest((X, Y, EACH))


@pytest.mark.parametrize("targets", [Y, Y[:, None], Y.astype("float32"), np.eye(3)[Y]])
def test_a_class_is_an_integer_or_a_one_hot_row(targets):
    assert ClassWeights(WEIGHTS)(X, targets)[2].tolist() == EACH.tolist()


@pytest.mark.parametrize(
    ("weights", "batch", "message"),
    [
        ([1.0, 2.0], (X, Y), "class_weight=.1.0, 2.0. must be a dict of class indices and weights"),
        ({}, (X, Y), "class_weight={} must be a dict of class indices and weights"),
        (WEIGHTS, (X, {"a": Y, "b": Y}), "class_weight needs a model with one output, but the targets are {'a'"),
        (WEIGHTS, (X, np.full((11, 3), 1 / 3)), "needs one class per example as the target.*probabilities"),
        (WEIGHTS, (X, Y + 0.5), "needs one class per example as the target.*probabilities"),
        (WEIGHTS, (X, np.stack([Y, Y], 1)), "needs one class per example as the target.*several values per example"),
        (WEIGHTS, (X, Y, np.arange(11)), "with a third entry of int64.*give ..inputs, index., targets."),
        (WEIGHTS, (X,), "class_weight needs batches .inputs, targets. or .inputs, targets, weights., not .ndarray"),
    ],
)
def test_targets_without_a_class_are_refused(weights, batch, message):
    with pytest.raises(BatchError, match=message):
        ClassWeights(weights)(*batch)


@pytest.mark.parametrize("make", [lambda *parts: parts, arrays, batches], ids=["arrays", "a pipeline", "batches"])
def test_an_index_as_the_third_entry_is_no_weight_beside_class_weights_either(make):
    with pytest.raises(LockstepError, match="with a third entry of int64"):
        digest(make(X, Y, np.arange(11)), WEIGHTS)


def test_for_a_keras_model_integers_are_weights():
    found = ClassWeights(WEIGHTS, takes_integers=True)(X, Y, np.arange(11))
    assert found[2].tolist() == (EACH * np.arange(11)).tolist()
