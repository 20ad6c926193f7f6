"""An objective is the user's function, and can be told from an ordinary loss."""

import cloudpickle
import pytest

import lockstep
from lockstep.core.objective import Objective, Sum


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
        ((1.0, 2.0), Sum(1.0, 2.0), {}, True),
        (((1.0, 2.0), {"a": 2}), Sum(1.0, 2.0), {"a": 2}, True),
        (Sum(1.0, 2.0), Sum(1.0, 2.0), {}, True),
        (Sum(1.0), Sum(1.0, None), {}, True),
        ((Sum(1.0), {"a": 2}), Sum(1.0), {"a": 2}, True),
        ((1.0, None), (1.0, None), {}, False),  # no pair: nothing is said of a count
        ([1.0, 2.0], [1.0, 2.0], {}, False),
    ],
)
def test_what_an_objective_may_return(returned, loss, values, gives_sum):
    made = lockstep.objective(lambda model, batch: returned)
    assert made.compute(None, None) == (loss, values)
    assert type(made.compute(None, None)[0]) is type(loss)
    assert made.gives_sum is gives_sum


def test_a_sum_cannot_be_changed():
    with pytest.raises(AttributeError):
        lockstep.Sum(1.0).count = 2
