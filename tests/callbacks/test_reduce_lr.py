"""When learning rates are reduced, and to what. The table is Keras's meaning, row by row."""

import math
from typing import Any

import pytest

from callbacks.fake_trainer import FakeTrainer, epochs, fit
from lockstep.callbacks import ReduceLROnPlateau
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.errors import CallbackError


class Rates(Callback):
    """Notes the first rate after every epoch, as a power of the factor 0.5 that begins at 1."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self.seen.append(-math.log2(self.trainer.learning_rates[0]))


@pytest.mark.parametrize(
    ("options", "losses", "halvings"),
    [
        ({"patience": 2}, [5, 5, 5, 5, 5, 5], [0, 0, 1, 1, 2, 2]),
        ({"patience": 1}, [5, 5, 5, 4, 4], [0, 1, 2, 2, 3]),
        ({"patience": 0}, [5, 5, 5], [0, 1, 2]),  # as patience 1, in Keras too
        ({"patience": 2}, [5, 5, 4, 4, 4], [0, 0, 0, 0, 1]),
        ({"patience": 2, "min_delta": 1}, [5, 4.5, 4, 3.5], [0, 0, 1, 1]),  # 3.5 improves on 5
        ({"patience": 2, "min_delta": 1}, [5, 4.5, 4, 4, 4], [0, 0, 1, 1, 2]),
        # After a reduction two epochs pass, the second of which may count already.
        ({"patience": 1, "cooldown": 2}, [5, 5, 5, 5, 5, 5, 5], [0, 1, 1, 2, 2, 3, 3]),
        ({"patience": 2, "cooldown": 1}, [5, 5, 5, 5, 5, 5], [0, 0, 1, 1, 2, 2]),
        ({"patience": 1, "min_lr": 0.25}, [5, 5, 5, 5, 5], [0, 1, 2, 2, 2]),
        ({"patience": 1, "min_lr": 0.5}, [5, 5, 5], [0, 1, 1]),
        ({"patience": 1, "mode": "max"}, [5, 6, 7, 6], [0, 0, 0, 1]),
        ({"patience": 1}, [math.nan, math.nan, 5], [1, 2, 2]),
    ],
)
def test_the_rate_is_reduced(options: dict[str, Any], losses: list[float], halvings: list[float]) -> None:
    rates = Rates()
    plateau = ReduceLROnPlateau("loss", factor=0.5, **options)
    fit(FakeTrainer((1.0,)), [plateau, rates], epochs("loss", losses))
    assert rates.seen == halvings


def test_every_group_is_reduced_and_none_is_raised() -> None:
    trainer = FakeTrainer((1.0, 0.2, 0.01))
    fit(trainer, [ReduceLROnPlateau("loss", factor=0.1, patience=1, min_lr=0.05)], epochs("loss", [5, 5]))
    assert trainer.learning_rates == (0.1, 0.05, 0.01)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_resumed_run_continues_its_count(cut: int) -> None:
    losses = epochs("loss", [5, 5, 5, 4, 4, 4, 4, 4, 4, 3])

    def callback() -> ReduceLROnPlateau:
        return ReduceLROnPlateau("loss", factor=0.5, patience=2, cooldown=2)

    whole, first, second, halves = Rates(), Rates(), Rates(), FakeTrainer((1.0,))
    fit(FakeTrainer((1.0,)), [callback(), whole], losses)
    saved = fit(halves, [callback(), first], losses[:cut])
    fit(halves, [callback(), second], losses[cut:], first=cut, state=saved)
    assert whole.seen == first.seen + second.seen
    assert whole.seen[-1] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"factor": 1},
            "factor, which multiplies the learning rate, must be above 0 and below 1. Got 1. Use factor=0.1.",
        ),
        (
            {"factor": 0},
            "factor, which multiplies the learning rate, must be above 0 and below 1. Got 0. Use factor=0.1.",
        ),
        ({"min_lr": -1}, "min_lr must be 0 or more. Got -1. Use min_lr=0."),
        ({"cooldown": -1}, "cooldown must be an integer, 0 or more. Got -1. Use for example cooldown=0."),
        ({"patience": True}, "patience must be an integer, 0 or more. Got True. Use for example patience=0."),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CallbackError) as caught:
        ReduceLROnPlateau(**options)
    assert str(caught.value) == message
