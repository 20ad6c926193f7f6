"""Before which steps of a `fit` changes of the script are looked for, and that none is missed."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.callbacks import Callback, LearningRateSchedule
from lockstep.errors import NonFiniteError

GENERATOR = np.random.Generator(np.random.PCG64(4))
X, Y = GENERATOR.standard_normal((20, 6)), GENERATOR.integers(0, 3, 20)


def wrap(devices):
    return lockstep.wrap(Dense([6, 8, 3], seed=1), SGD(0.1), "cross_entropy", devices=devices, shards=4)


class AfterBatches(Callback):
    """Halves a weight after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.trainer.model.parameters["0.weight"][0] *= 0.5


class AfterEpochs(Callback):
    """Halves a weight after each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.trainer.model.parameters["0.weight"][0] *= 0.5


CASES = [  # callbacks, and how often changes are looked for in two epochs of four steps
    ([], 4),  # before the first step of an epoch, and after the last
    ([AfterEpochs()], 4),
    ([AfterBatches()], 8),
    ([LearningRateSchedule(lambda epoch: 0.1 / (epoch + 1))], 4),
    ([LearningRateSchedule(lambda step: 0.1 / (step + 1), per="step")], 8),
]


@pytest.fixture
def pair():
    """Trainers on one device and on two."""
    with wrap(1) as alone, wrap(2) as both:
        assert len(both.devices) == 2
        yield alone, both


def test_changes_are_looked_for_if_code_of_the_script_has_run(pair, monkeypatch):
    backend, looks = pair[1].session.backend, []
    touched = backend.touched
    monkeypatch.setattr(backend, "touched", lambda: looks.append(None) or touched())
    found = []
    for callbacks, _ in CASES:
        looks.clear()
        for trainer in pair:
            trainer.fit((X, Y), batch_size=5, epochs=2, callbacks=callbacks, verbose=0)
        found.append((callbacks, len(looks)))
        assert pair[0].digest() == pair[1].digest(), callbacks
    assert found == CASES


def test_data_that_runs_code_of_the_script_is_no_quiet_period(pair):
    for trainer in pair:

        def batches(model=trainer.model):
            for first in range(0, 20, 5):
                model.parameters["0.weight"][0] *= 0.5
                yield X[first : first + 5], Y[first : first + 5]

        trainer.fit(batches(), verbose=0)
    assert pair[0].digest() == pair[1].digest()


def test_a_period_ends_with_a_fit_that_fails(pair):
    poor = X.copy()
    poor[-1] = np.nan
    for trainer in pair:
        with pytest.raises(NonFiniteError):
            trainer.fit((poor, Y), batch_size=5, shuffle=False, verbose=0)
        trainer.model.parameters["0.weight"][0] *= 0.5
        trainer.step((X, Y), verbose=0)
    assert pair[0].digest() == pair[1].digest()
