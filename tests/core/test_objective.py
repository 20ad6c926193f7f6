"""An objective is the user's function, and can be told from an ordinary loss."""

import cloudpickle
import numpy as np
import pytest

import lockstep
from lockstep.core.objective import Carried, Objective, Sum, read_sum
from lockstep.errors import ModelError

ONE = np.ones(())


def test_an_objective_calls_its_function_and_travels():
    @lockstep.objective
    def loss(model, batch):
        return model(batch) + 1

    assert isinstance(loss, Objective)
    assert cloudpickle.loads(cloudpickle.dumps(loss))(abs, -3) == loss(abs, -3) == 4


@pytest.mark.parametrize(
    ("returned", "loss", "values", "gives_sum"),
    [
        (1.0, 1.0, {}, False),
        ((1.0, {"a": 2}), 1.0, {"a": 2}, False),
        ((ONE, 2.0), Sum(ONE, 2.0), {}, True),
        (((ONE, 2.0), {"a": 2}), Sum(ONE, 2.0), {"a": 2}, True),
        (Sum(ONE, 2.0), Sum(ONE, 2.0), {}, True),
        (Sum(ONE), Sum(ONE, None), {}, True),
        ((Sum(ONE), {"a": 2}), Sum(ONE), {"a": 2}, True),
        ((1.0, None), (1.0, None), {}, False),  # no pair: nothing is said of a count
        ([1.0, 2.0], [1.0, 2.0], {}, False),
    ],
)
def test_what_an_objective_may_return(returned, loss, values, gives_sum):
    made = lockstep.objective(lambda model, batch: returned)
    assert made.compute(None, None) == (loss, values, None)
    assert type(made.compute(None, None)[0]) is type(loss)
    assert made.gives_sum is gives_sum


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (Carried(1.0, ONE), (1.0, {}, ONE)),
        (Carried(1.0, {"h": ONE}), (1.0, {}, {"h": ONE})),  # no metrics
        ((Carried(1.0, ONE), {"a": 2}), (1.0, {"a": 2}, ONE)),
        (Carried(Sum(ONE, 2.0), (ONE, ONE)), (Sum(ONE, 2.0), {}, (ONE, ONE))),
    ],
)
def test_state_stands_beside_the_loss(returned, expected):
    made = lockstep.objective(lambda model, batch: returned)
    assert made.compute(None, None) == expected
    assert made.gives_sum is isinstance(expected[0], Sum)


@pytest.mark.parametrize("returned", [Carried(1.0, None), Carried((1.0, {"a": 2}), ONE), Carried((ONE, 2.0), ONE)])
def test_state_beside_something_else_is_refused(returned):
    with pytest.raises(
        ModelError,
        match=r"takes a loss and its state\. Got \(.* or \(lockstep\.Carried\(loss, state\), {.* as lockstep\.Sum",
    ):
        lockstep.objective(lambda model, batch: returned).compute(None, None)


def test_a_loss_of_outputs_gives_no_state():
    with pytest.raises(
        ModelError,
        match=r"^Only an objective can return lockstep\.Carried.* Write @lockstep\.objective above a function",
    ):
        read_sum(Carried(ONE, ONE))


def test_a_sum_cannot_be_changed():
    with pytest.raises(AttributeError):
        lockstep.Sum(ONE).count = 2


@pytest.mark.parametrize(
    ("total", "words"), [(3.0, "float"), (np.ones(4), "ndarray(4,)"), (np.ones((1, 2)), "ndarray(1, 2)")]
)
def test_a_total_is_one_number(total, words):
    with pytest.raises(ModelError) as caught:
        lockstep.objective(lambda model, batch: Sum(total, 2)).compute(None, None)
    assert str(caught.value) == (
        f"The total of a lockstep.Sum must be an array of one number. Got {words}. Compute the total from "
        "the model's outputs, for example as losses.sum()."
    )
