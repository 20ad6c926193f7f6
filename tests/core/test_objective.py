"""An objective is the user's function, and can be told from an ordinary loss."""

import cloudpickle

import lockstep
from lockstep.core.objective import Objective


def test_an_objective_calls_its_function_and_travels():
    @lockstep.objective
    def loss(model, batch):
        return model(batch) + 1

    assert isinstance(loss, Objective)
    assert cloudpickle.loads(cloudpickle.dumps(loss))(abs, -3) == loss(abs, -3) == 4
