"""The averaged model: its arithmetic, its types, and the model's own weights before and after."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import lockstep
from callbacks.fake_trainer import FakeTrainer, fit
from lockstep.backends.numpy import SGD, Dense
from lockstep.callbacks import EMA
from lockstep.core.types import Array
from lockstep.errors import CallbackError, StateError


def by_hand(decay: float, values: list[float]) -> np.ndarray[Any, Any]:
    """The average in float32, one operation at a time."""
    average = np.float32(values[0])
    for value in values[1:]:
        average = average * np.float32(decay) + np.float32(value) * np.float32(1 - decay)
    return np.full(2, average)


@pytest.mark.parametrize(
    ("decay", "every", "values"),
    [
        (0.9, 1, [1, 2, 3, 4, 5, 6]),  # the trainer's weight is the number of steps made
        (0.9, 2, [2, 4, 6]),
        (0.5, 4, [4]),  # the first update copies
        (0.0, 1, [6]),
        (0.5, 1, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_average(decay: float, every: int, values: list[float]) -> None:
    ema = EMA(decay, every)
    fit(FakeTrainer(), [ema], [{}] * 3)
    np.testing.assert_array_equal(ema.arrays["model.weight"], by_hand(decay, values))
    assert ema.arrays["model.weight"].dtype == np.float32
    assert ema.arrays["model.count"] == values[-1]  # of an integer the newest value is kept
    assert list(ema.arrays) == ["model.weight", "model.count"]


def test_an_average_continues_through_two_fits() -> None:
    trainer, ema = FakeTrainer(), EMA(0.9)
    fit(trainer, [ema], [{}])
    before = ema.arrays["model.weight"]
    fit(trainer, [ema], [{}])
    np.testing.assert_array_equal(ema.arrays["model.weight"], by_hand(0.9, [1, 2, 3, 4]))
    np.testing.assert_array_equal(before, by_hand(0.9, [1, 2]))  # `arrays` are copies


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("cut", range(4))
def test_a_resumed_average_continues(cut: int, every: int) -> None:
    whole, first, second, trainer = EMA(0.9, every), EMA(0.9, every), EMA(0.9, every), FakeTrainer()
    fit(FakeTrainer(), [whole], [{}] * 4)
    saved = fit(trainer, [first], [{}] * cut)
    kept = {name: average.copy() for name, average in saved[0]["state"]["arrays"].items()}
    fit(trainer, [first], [{}])  # a state that is being written does not change
    assert all(np.array_equal(kept[name], average) for name, average in saved[0]["state"]["arrays"].items())
    trainer.num_steps = 2 * cut
    fit(trainer, [second], [{}] * (4 - cut), first=cut, state=saved)
    assert {name: average.tobytes() for name, average in whole.arrays.items()} == {
        name: average.tobytes() for name, average in second.arrays.items()
    }
    for name, average in saved[0]["state"]["arrays"].items():  # what was loaded is not written to
        assert np.array_equal(kept[name], average)
        assert not np.shares_memory(average, second.arrays[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_are_averaged_wide_and_applied_narrow(dtype: str) -> None:
    kind = getattr(torch, dtype)

    def array(value: torch.Tensor) -> Array:
        held = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return Array(value.to(kind).view(torch.int16).numpy().view(held), dtype)

    trainer, ema = FakeTrainer(), EMA(0.9)
    ema.set_trainer(trainer)
    generator = torch.Generator().manual_seed(0)
    average = None
    for _ in range(5):
        value = torch.randn(100, generator=generator).to(kind)
        trainer.arrays["model.weight"] = array(value)
        trainer.num_steps += 1
        ema.on_train_batch_end(0)
        average = value.float() if average is None else average * 0.9 + value.float() * np.float32(1 - 0.9).item()
    assert average is not None
    np.testing.assert_array_equal(ema.arrays["model.weight"], average.numpy())
    own = trainer.arrays["model.weight"].data.tobytes()
    with ema.applied():
        assert trainer.arrays["model.weight"].data.tobytes() == array(average).data.tobytes() != own
        assert trainer.arrays["model.weight"].dtype == dtype
    assert trainer.arrays["model.weight"].data.tobytes() == own


def test_applied_restores_the_model_also_after_an_error() -> None:
    trainer, ema = FakeTrainer(), EMA(0.5)
    fit(trainer, [ema], [{}] * 2)
    before = {name: data.tobytes() for name, (data, _) in trainer.arrays.items()}

    def look() -> None:
        with ema.applied():
            assert trainer.weight == by_hand(0.5, [1, 2, 3, 4])[0] != 4
            assert trainer.momentum == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    assert {name: data.tobytes() for name, (data, _) in trainer.arrays.items()} == before


@pytest.mark.parametrize("devices", [1, 3])
def test_a_real_model_on_any_number_of_devices(devices: int) -> None:
    x, y = np.random.default_rng(0).normal(size=(32, 4)), np.arange(32) % 3
    ema = EMA(0.9)
    with lockstep.wrap(Dense([4, 3], seed=1), SGD(1.0), "cross_entropy", devices=devices, shards=4) as trainer:
        assert len(trainer.devices) == devices
        trainer.fit((x, y), epochs=2, batch_size=8, callbacks=[ema], verbose=0)
        own = trainer.digest(), trainer.evaluate((x, y))
        with ema.applied():
            averaged = trainer.evaluate((x, y))
        assert (trainer.digest(), trainer.evaluate((x, y))) == own
        assert averaged != own[1]
    model = Dense([4, 3], seed=1)
    for name, value in model.parameters.items():
        value[...] = ema.arrays[f"model.{name}"]
    with lockstep.wrap(model, SGD(1.0), "cross_entropy", shards=4) as alone:
        assert alone.evaluate((x, y)) == averaged


def test_running_statistics_are_averaged_too() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 4), torch.arange(16) % 4
    ema = EMA(0.5)
    with lockstep.wrap(model, optimizer, torch.nn.CrossEntropyLoss(), devices=1, shards=2) as trainer:
        trainer.fit((x, y), epochs=2, batch_size=8, callbacks=[ema], verbose=0)
        own = model[1].running_mean.clone()
        with ema.applied():
            applied = model[1].running_mean.numpy().copy()
            assert model[1].num_batches_tracked == 4
        assert torch.equal(model[1].running_mean, own)
    np.testing.assert_array_equal(applied, ema.arrays["model.1.running_mean"])
    assert not np.array_equal(applied, own.numpy())


def other_model() -> EMA:
    ema = EMA(0.9)
    fit(FakeTrainer(), [ema], [{}])
    trainer = FakeTrainer()
    trainer.arrays["model.weight"] = Array(np.zeros(3, "float32"), "float32")
    fit(trainer, [ema], [{}])
    return ema


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: EMA(1.0),
            CallbackError,
            "decay, the weight of the old average, must be 0 or more and below 1. Got 1.0. Use for example "
            "decay=0.999.",
        ),
        (
            lambda: EMA(0.9, every=0),
            CallbackError,
            "every must be an integer, 1 or more. Got 0. Use for example every=1.",
        ),
        (
            lambda: EMA(0.9).applied().__enter__(),
            CallbackError,
            "This EMA has no averages yet, because no step has updated it. Call trainer.fit(..., "
            "callbacks=[ema]) before ema.applied().",
        ),
        (
            other_model,
            StateError,
            "This EMA averages another model: 'model.weight' is (2,) in the EMA and (3,) in the model. Use a "
            "new EMA for this model.",
        ),
    ],
)
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message
