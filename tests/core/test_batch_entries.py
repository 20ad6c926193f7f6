"""What a third entry of a batch may be, and what is said if it may be something else."""

import numpy as np
import pytest

from lockstep.core.batch_entries import call_model, explain_missing_input, split_batch
from lockstep.errors import BatchError

X, Y = np.zeros((4, 2)), np.zeros(4)


class Foreign:
    """An array whose type has another framework's way of telling its name."""

    def __init__(self, dtype):
        self.dtype, self.shape = dtype, (4,)


class Shaped(dict):
    """Named arrays that have a shape themselves, as tensordict's."""

    shape = (4,)


def test_a_mapping_with_a_shape_is_spread():
    assert call_model(lambda a, b: a + b, Shaped(a=1, b=2)) == 3


class Word:
    def __str__(self):
        return "torch.int32"


@pytest.mark.parametrize(
    "weights",
    [
        None,
        np.array([0.5, -1, 2, 0]),
        np.ones((4, 1), "float16"),
        np.array([True, False, True, True]),
        [0.5, 1, 2, 3],
        [True, False, True, True],
        Foreign(np.float32),
        Foreign("torch.bfloat16"),
    ],
)
def test_floats_and_bools_are_weights(weights):
    assert split_batch((X, Y, weights), "weights.float()")[2] is weights


@pytest.mark.parametrize(
    ("third", "kind", "form"),
    [
        (np.arange(4), "int64", "ndarray(4,)"),
        (np.arange(4, dtype="uint8"), "uint8", "ndarray(4,)"),
        (-np.arange(4, dtype="int32")[:, None], "int32", "ndarray(4, 1)"),
        ([0, 1, 2, 3], "int", "list of 4"),
        (Foreign(np.int64), "int64", "Foreign(4,)"),  # MXNet's types are numpy's classes
        (Foreign(Word()), "int32", "Foreign(4,)"),
    ],
)
def test_integers_may_be_something_else(third, kind, form):
    with pytest.raises(BatchError) as caught:
        split_batch((X, Y, third), "weights.float()")
    assert str(caught.value) == (
        "The third entry of a batch is the example weights, which must be floats or bools. "
        f"Got the batch (ndarray(4, 2), ndarray(4,), {form}) with a third entry of {kind}. If the third entry is an "
        "index or an id, give ((inputs, index), targets) to a model that uses it, or leave it out. If the third entry "
        "is example weights, give weights.float(). If the first two entries are both inputs, give ((a, b), targets)."
    )


def test_a_batch_of_another_form():
    with pytest.raises(BatchError, match=r"The batch \(ndarray\(4, 2\)\) cannot be used.*, or write an objective"):
        split_batch((X,), "")


def test_a_model_that_lacks_an_input():
    def model(a, b):
        return a + b

    def explain(batch):
        with pytest.raises(TypeError) as raised:
            model(X)
        explain_missing_input(raised.value, batch)

    with pytest.raises(BatchError) as caught:
        explain((X, X, Y))
    assert str(caught.value) == (
        "test_a_model_that_lacks_an_input.<locals>.model() missing 1 required positional argument: 'b'. The model was "
        "called with the first entry of the batch (ndarray(4, 2), ndarray(4, 2), ndarray(4,)), because three entries "
        "are (inputs, targets, weights). If the first two entries are both inputs, give ((a, b), targets)."
    )
    explain((X, Y))  # nothing of that to say
    explain({"a": X})
    explain_missing_input(TypeError("another"), (X, X, Y))
