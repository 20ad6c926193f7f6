"""A function is called with plain numbers, at the right moments."""

from typing import Any

import numpy as np
import pytest

from callbacks.fake_trainer import Stage, fit
from lockstep.callbacks import Log
from lockstep.errors import CallbackError

EPOCHS = [{"loss": np.float32(4.0)}, {"loss": np.float32(2.0)}]


@pytest.mark.parametrize(
    ("every", "calls"),
    [
        ("epoch", [(0, 3, 4.0), (1, 6, 2.0)]),
        (2, [(0, 2, 4.0), (0, 3, 4.0), (1, 4, 2.0), (1, 6, 2.0), (1, 6, 2.0)]),  # the last: step and epoch
        (4, [(0, 3, 4.0), (1, 4, 2.0), (1, 6, 2.0)]),
    ],
)
def test_calls(every: int | str, calls: list[tuple[int, int, float]]) -> None:
    seen: list[dict[str, Any]] = []
    fit(Stage(), [Log(seen.append, every)], EPOCHS, steps=3)
    assert seen == [{"epoch": epoch, "step": step, "loss": loss} for epoch, step, loss in calls]
    assert {type(call["loss"]) for call in seen} == {float}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Log("wandb"), "Log calls a function with a dict. Got 'wandb'. Use for example Log(print)."),  # type: ignore[arg-type]
        (lambda: Log(print, "step"), "every is 'epoch' or a number of steps. Got 'step'. Use every=100."),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(CallbackError) as caught:
        make()
    assert str(caught.value) == message
