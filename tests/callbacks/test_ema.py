"""The averaged model: its arithmetic, its types, and the model's own weights before and after."""

from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from callbacks.fake_trainer import Stage, fit
from lockstep.backends.base import Array
from lockstep.backends.numpy import SGD, Dense
from lockstep.callbacks import EMA
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
        (0.9, 1, [1, 2, 3, 4, 5, 6]),  # the stage's weight is the number of steps made
        (0.9, 2, [2, 4, 6]),
        (0.5, 4, [4]),  # the first update copies
        (0.0, 1, [6]),
        (0.5, 1, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_average(decay: float, every: int, values: list[float]) -> None:
    ema = EMA(decay, every)
    fit(Stage(), [ema], [{}] * 3)
    np.testing.assert_array_equal(ema.arrays["model.weight"], by_hand(decay, values))
    assert ema.arrays["model.weight"].dtype == np.float32
    assert ema.arrays["model.count"] == values[-1]  # a whole number is the newest
    assert list(ema.arrays) == ["model.weight", "model.count"]


def test_the_average_is_updated_in_place() -> None:
    stage, ema = Stage(), EMA(0.9)
    fit(stage, [ema], [{}])
    before = ema.arrays["model.weight"]
    fit(stage, [ema], [{}])
    assert ema.arrays["model.weight"] is before
    np.testing.assert_array_equal(before, by_hand(0.9, [1, 2, 3, 4]))  # through both fits


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("cut", range(4))
def test_a_resumed_average_goes_on(cut: int, every: int) -> None:
    whole, first, second, stage = EMA(0.9, every), EMA(0.9, every), EMA(0.9, every), Stage()
    fit(Stage(), [whole], [{}] * 4)
    saved = fit(stage, [first], [{}] * cut)
    kept = {name: average.copy() for name, average in saved[0]["state"]["arrays"].items()}
    fit(stage, [first], [{}])  # a state that is being written does not change
    assert all(np.array_equal(kept[name], average) for name, average in saved[0]["state"]["arrays"].items())
    stage.num_steps = 2 * cut
    fit(stage, [second], [{}] * (4 - cut), first=cut, state=saved)
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
        return Array(value.to(kind).view(torch.int16).numpy().view("int16" if dtype == "bfloat16" else dtype), dtype)

    stage, ema = Stage(), EMA(0.9)
    ema.set_trainer(stage)
    generator = torch.Generator().manual_seed(0)
    average = None
    for _ in range(5):
        value = torch.randn(100, generator=generator).to(kind)
        stage.arrays["model.weight"] = array(value)
        stage.num_steps += 1
        ema.on_train_batch_end(0)
        average = value.float() if average is None else average * 0.9 + value.float() * np.float32(1 - 0.9).item()
    assert average is not None
    np.testing.assert_array_equal(ema.arrays["model.weight"], average.numpy())
    own = stage.arrays["model.weight"].data.tobytes()
    with ema.applied():
        assert stage.arrays["model.weight"].data.tobytes() == array(average).data.tobytes() != own
        assert stage.arrays["model.weight"].dtype == dtype
    assert stage.arrays["model.weight"].data.tobytes() == own


def test_applied_gives_everything_back_also_after_an_error() -> None:
    stage, ema = Stage(), EMA(0.5)
    fit(stage, [ema], [{}] * 2)
    before = {name: data.tobytes() for name, (data, _) in stage.arrays.items()}

    def look() -> None:
        with ema.applied():
            assert stage.weight == by_hand(0.5, [1, 2, 3, 4])[0] != 4
            assert stage.momentum == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    assert {name: data.tobytes() for name, (data, _) in stage.arrays.items()} == before


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
    fit(Stage(), [ema], [{}])
    stage = Stage()
    stage.arrays["model.weight"] = Array(np.zeros(3, "float32"), "float32")
    fit(stage, [ema], [{}])
    return ema


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: EMA(1.0),
            CallbackError,
            "decay is the weight of the old average: 0 or more, below 1. Got 1.0. Use 0.999.",
        ),
        (lambda: EMA(0.9, every=0), CallbackError, "every is a whole number, 1 or more. Got 0. Use every=1."),
        (
            lambda: EMA(0.9).applied().__enter__(),
            CallbackError,
            "An EMA has averages after its first update. Got none yet. "
            "Call trainer.fit(..., callbacks=[ema]) before ema.applied().",
        ),
        (
            other_model,
            StateError,
            "An EMA averages one model. At 'model.weight' it has (2,), the model (3,). Use a new EMA for this model.",
        ),
    ],
)
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message
