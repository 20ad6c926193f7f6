"""A run that was stopped goes on as if it had not been: same bytes, same history, callbacks in mid-count."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from sigterm_at_step import TermAt

EXAMPLES, BATCH_SIZE, EPOCHS = 61, 16, 3
STEPS = EPOCHS * -(-EXAMPLES // BATCH_SIZE)
x = np.random.default_rng(0).normal(size=(EXAMPLES, 6))
y = np.arange(EXAMPLES) % 3


def wrapped(devices=1):
    model = Dense([6, 8, 3], dropout=0.2, seed=1)
    return lockstep.wrap(
        model, SGD(0.3, momentum=0.9), "cross_entropy", metrics=["accuracy"], shards=4, devices=devices
    )


def callbacks():
    return [
        lockstep.EMA(0.9),
        lockstep.EarlyStopping("loss", patience=50, restore_best=True),
        lockstep.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=10.0),
        lockstep.LearningRateSchedule(lambda step, rate: rate * 0.99, per="step"),
    ]


def outcome(trainer, history, used):
    """All that a run leaves behind, down to the last bit."""
    ema = {name: value.tobytes() for name, value in used[0].arrays.items()}
    return trainer.digest(), history.history, history.epoch, trainer.learning_rates, ema, used[1].state_dict()["wait"]


def fitted(folder, devices=1, stop_at=None, checkpoint=None):
    """Fits; gives None where it was stopped on the way."""
    used = callbacks()
    extra = [] if stop_at is None else [TermAt(stop_at)]
    with wrapped(devices) as trainer:
        assert len(trainer.devices) == devices
        try:
            history = trainer.fit(
                (x, y),
                epochs=EPOCHS,
                batch_size=BATCH_SIZE,
                validation_data=(x, y),
                callbacks=[*used, *extra],
                checkpoint=checkpoint or folder,
                verbose=0,
            )
        except SystemExit as leaving:
            return leaving.code or None
        return outcome(trainer, history, used)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that was never stopped."""
    return fitted(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("stop_at", range(1, STEPS + 1))
def test_a_run_stopped_after_any_step_ends_the_same(stop_at, devices, whole, tmp_path):
    stopped = fitted(tmp_path, stop_at=stop_at)
    assert stopped is None or stop_at == STEPS
    assert fitted(tmp_path, devices) == whole


def test_a_run_stopped_again_and_again(whole, tmp_path):
    for stop_at in range(1, STEPS):
        assert fitted(tmp_path, 1 + stop_at % 3, stop_at) is None
    assert fitted(tmp_path, 2) == whole
