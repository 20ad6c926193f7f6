"""Learning rates that follow a function or PyTorch's own schedulers, whole and resumed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import lockstep
from callbacks.fake_trainer import FakeTrainer, fit
from lockstep.callbacks import LearningRateSchedule
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.errors import CallbackError, StateError


class Rates(Callback):
    """Notes all groups' rates in every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        self.seen.append(self.trainer.learning_rates)


def played(
    schedule: Callback, trainer: FakeTrainer, num_epochs: int, first: int = 0, state: Any = None
) -> tuple[Any, Any]:
    """The first group's rate in every step, two an epoch, and the state at the end."""
    rates = Rates()
    saved = fit(trainer, [schedule, rates], [{}] * num_epochs, first=first, state=state)
    return [first for first, *_ in rates.seen], saved


@pytest.mark.parametrize(
    ("schedule", "per", "rates"),
    [
        (lambda epoch: 1 / (1 + epoch), "epoch", [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3]),
        (lambda step: 1 / (1 + step), "step", [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
        (lambda epoch, rate: rate / 2, "epoch", [4, 4, 2, 2, 1, 1]),
        (lambda step, rate: rate / 2, "step", [4, 2, 1, 1 / 2, 1 / 4, 1 / 8]),
        (lambda epoch, base=3.0: base - epoch, "epoch", [3, 3, 2, 2, 1, 1]),  # a default is the function's own
        (lambda *index: index[0], "epoch", [0, 0, 1, 1, 2, 2]),
        (np.float32, "epoch", [0, 0, 1, 1, 2, 2]),  # a builtin that does not say what it takes
        (lambda epoch: np.float32(0.5), "epoch", [0.5] * 6),
        (lambda epoch: torch.tensor(0.5), "epoch", [0.5] * 6),
    ],
)
def test_a_function_is_called_before_a_step_or_epoch(
    schedule: Callable[..., float], per: str, rates: list[float]
) -> None:
    trainer = FakeTrainer((8.0,))
    seen, _ = played(LearningRateSchedule(schedule, per), trainer, 3)
    assert seen == rates
    assert {type(rate) for rate in seen} == {float}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((0.5,), (0.25,)),
        ((0.5, 0.5), (0.25, 0.25)),
        ((0.5, 0.125, 1.0), (0.25, 0.0625, 0.5)),
        ((0.5, 0.0), (0.25, 0.0)),
        ((0.0, 0.0), (0.25, 0.25)),  # a warm-up from nothing
    ],
)
def test_groups_keep_their_ratio(rates: tuple[float, ...], expected: tuple[float, ...]) -> None:
    trainer = FakeTrainer(rates)
    fit(trainer, [LearningRateSchedule(lambda epoch: 0.25)], [{}])
    assert trainer.learning_rates == expected


def test_ratios_are_kept_through_a_rate_of_zero() -> None:
    trainer, schedule = FakeTrainer((0.5, 0.25)), LearningRateSchedule(lambda epoch: (0.5, 0.0)[epoch])
    fit(trainer, [schedule], [{}, {}])
    assert trainer.learning_rates == (0.0, 0.0)
    fit(trainer, [schedule], [{}])
    assert trainer.learning_rates == (0.5, 0.25)
    trainer.learning_rates = (1.0, 0.1)  # the script's own change counts
    fit(trainer, [schedule], [{}])
    assert trainer.learning_rates == (0.5, 0.05)


@pytest.mark.parametrize("per", ["epoch", "step"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resumed_function_continues(per: str, cut: int) -> None:
    def schedule() -> LearningRateSchedule:
        return LearningRateSchedule(lambda index, rate: rate * 0.9 + 0.01 * index, per)

    whole, _ = played(schedule(), FakeTrainer(), 4)
    halves = FakeTrainer()
    first, saved = played(schedule(), halves, cut)
    second, _ = played(schedule(), halves, 4 - cut, first=cut, state=saved)
    assert whole == first + second


def test_an_epoch_resumed_in_its_middle_keeps_its_rate() -> None:
    trainer = FakeTrainer((1.0,))
    _, saved = played(LearningRateSchedule(lambda epoch, rate: rate / 2), trainer, 2)
    # The checkpoint was made within epoch 1: fit begins that epoch again.
    rates, _ = played(LearningRateSchedule(lambda epoch, rate: rate / 2), trainer, 2, first=1, state=saved)
    assert rates == [0.25, 0.25, 0.125, 0.125]


# ---------------------------------------------------------------- PyTorch's schedulers


def sequence(optimizer: Any) -> Any:
    schedulers = [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
        lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, schedulers, [3, 7])


class Half:
    """A callable with a state of its own."""

    def __init__(self) -> None:
        self.power = 0.5

    def __call__(self, index: int) -> float:
        return self.power**index


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 8]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda index: 0.9**index),
    "LambdaLR of an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Half()),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda index: 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9, 2.0),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=13),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, 3, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.1, 1.0, 3, scale_fn=lambda x: 0.9**x
    ),
    "SequentialLR": sequence,
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


class FakeTorchTrainer(FakeTrainer):
    """A trainer with an optimizer of PyTorch's, two groups of it."""

    def __init__(self) -> None:
        first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        groups = [{"params": [first]}, {"params": [second], "lr": 0.05}]
        self.optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        super().__init__()

    @property  # type: ignore[override]
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(group["lr"] for group in self.optimizer.param_groups)

    @learning_rates.setter
    def learning_rates(self, rates: tuple[float, ...]) -> None:
        pass

    def step(self) -> None:
        super().step()
        self.optimizer.step()


def numbers(optimizer: Any) -> list[dict[str, Any]]:
    """What a checkpoint keeps of an optimizer's groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def by_hand(make: Callable[[Any], Any], per: str, num_epochs: int) -> list[tuple[float, ...]]:
    """The rates of PyTorch's own loop."""
    trainer = FakeTorchTrainer()
    scheduler = make(trainer.optimizer)
    seen = []
    for _ in range(num_epochs):
        for _ in range(2):
            seen.append(trainer.learning_rates)
            trainer.step()
            if per == "step":
                scheduler.step()
        if per == "epoch":
            scheduler.step()
    return seen


class RatesUsed(Rates):
    """Notes the rates that a step is made with."""

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        self.seen.append(self.trainer.learning_rates)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        pass


@pytest.mark.parametrize("per", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_rates_of_torchs_own_loop(name: str, per: str) -> None:
    trainer, rates = FakeTorchTrainer(), RatesUsed()
    fit(trainer, [LearningRateSchedule(SCHEDULERS[name](trainer.optimizer), per), rates], [{}] * 6)
    assert rates.seen == by_hand(SCHEDULERS[name], per, 6)
    assert len(set(rates.seen)) > 2


@pytest.mark.parametrize("per", ["epoch", "step"])
@pytest.mark.parametrize("cut", [1, 3, 4])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_scheduler_continues(name: str, cut: int, per: str) -> None:
    first, second = FakeTorchTrainer(), FakeTorchTrainer()
    before, after = RatesUsed(), RatesUsed()
    saved = fit(first, [LearningRateSchedule(SCHEDULERS[name](first.optimizer), per), before], [{}] * cut)
    assert_plain(saved)
    schedule = LearningRateSchedule(SCHEDULERS[name](second.optimizer), per)
    for group, kept in zip(second.optimizer.param_groups, numbers(first.optimizer), strict=True):
        group.update(kept)
    fit(second, [schedule, after], [{}] * (6 - cut), first=cut, state=saved)
    assert before.seen + after.seen == by_hand(SCHEDULERS[name], per, 6)


def assert_plain(value: Any) -> None:
    """Nothing but what a checkpoint holds, by exact type."""
    if type(value) in (list, tuple):
        for item in value:
            assert_plain(item)
    elif type(value) is dict:
        assert_plain(list(value))
        assert_plain(list(value.values()))
    else:
        assert type(value) in (int, float, str, bool, type(None)), value


def test_what_a_scheduler_saves_does_not_change_later() -> None:
    trainer = FakeTorchTrainer()
    schedule = LearningRateSchedule(lr_scheduler.StepLR(trainer.optimizer, 1))
    saved = fit(trainer, [schedule], [{}])
    before = repr(saved)
    fit(trainer, [schedule], [{}])
    assert repr(saved) == before


def test_a_real_model_follows_its_scheduler() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    rates = RatesUsed()
    schedule = LearningRateSchedule(lr_scheduler.StepLR(optimizer, 2, gamma=0.5), per="step")
    with lockstep.wrap(model, optimizer, torch.nn.CrossEntropyLoss(), devices=1, shards=2) as trainer:
        trainer.fit((x, y), epochs=3, batch_size=8, callbacks=[schedule, rates], verbose=0)
    assert rates.seen == [(0.5,), (0.5,), (0.25,), (0.25,), (0.125,), (0.125,)]


# ---------------------------------------------------------------- refusals


class Stateless:
    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LearningRateSchedule(lambda epoch: 0.1, per="batch"),
            "per must be 'epoch' or 'step'. Got per='batch'. Use for example per='step'.",
        ),
        (
            lambda: LearningRateSchedule(0.1),
            "A schedule must be a function of the epoch or step, or a scheduler with step(). Got 0.1. "
            "Use for example LearningRateSchedule(lambda epoch: 0.1 * 0.9**epoch).",
        ),
        (
            lambda: LearningRateSchedule(lr_scheduler.ReduceLROnPlateau(FakeTorchTrainer().optimizer)),
            "LearningRateSchedule calls step() without arguments, but ReduceLROnPlateau.step requires an argument. "
            "Use lockstep.ReduceLROnPlateau if the argument is a metric.",
        ),
        (
            lambda: LearningRateSchedule(Stateless()),
            "The scheduler Stateless has no state_dict(), which a checkpoint needs. Add a state_dict method to its "
            "class, or use a function of the epoch or step.",
        ),
        (
            lambda: LearningRateSchedule(lambda: 0.1),
            "A schedule must be a function of the epoch or step number, or of that number and the current "
            "learning rate. Got a function with 0 required arguments. Use for example lambda epoch: 0.1 * "
            "0.9**epoch.",
        ),
        (
            lambda: LearningRateSchedule(lambda a, b, c: 0.1),
            "A schedule must be a function of the epoch or step number, or of that number and the current "
            "learning rate. Got a function with 3 required arguments. Use for example lambda epoch: 0.1 * "
            "0.9**epoch.",
        ),
        (
            lambda: fit(FakeTrainer(), [LearningRateSchedule(lambda step: None, per="step")], [{}]),
            "The schedule returned None for step 0. Return a learning rate: a finite number, 0 or more.",
        ),
        (
            lambda: fit(FakeTrainer(), [LearningRateSchedule(lambda epoch: (0.1, math.nan)[epoch])], [{}, {}]),
            "The schedule returned nan for epoch 1. Return a learning rate: a finite number, 0 or more.",
        ),
        (
            lambda: fit(FakeTrainer((0.0, 0.1)), [LearningRateSchedule(lambda epoch: 0.1)], [{}]),
            "The learning rates of the groups of parameters are (0.0, 0.1). LearningRateSchedule keeps the ratio of "
            "each rate to the first rate, so the first rate must not be 0. Begin with a rate above 0 in the first "
            "group.",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(CallbackError) as caught:
        make()
    assert str(caught.value) == message


def test_a_rate_in_a_tensor_cannot_be_saved() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    with pytest.raises(StateError) as caught:
        LearningRateSchedule(lr_scheduler.StepLR(optimizer, 1)).state_dict()
    assert str(caught.value) == (
        "scheduler['base_lrs'][0] is a Tensor, which a checkpoint cannot store. Use a number, a string, a numpy "
        "array, or a list, tuple or dict of these; or train without a checkpoint."
    )
