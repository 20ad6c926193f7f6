"""Where the time of a fit went: kept for every process, epoch after epoch."""

import numpy as np
import pytest

import lockstep
from lockstep.backends.numpy import SGD, Dense

x = np.random.default_rng(0).normal(size=(61, 6))
y = np.arange(61) % 3


class FirstEpoch(lockstep.Callback):
    breakdown = None

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.breakdown = self.trainer.breakdown


@pytest.mark.parametrize("devices", [1, 2])
def test_a_breakdown_grows_with_the_epochs(devices, capsys):
    first = FirstEpoch()
    model = Dense([6, 8, 3], seed=1)
    with lockstep.wrap(model, SGD(0.1), "cross_entropy", devices=devices, shards=4) as trainer:
        assert len(trainer.devices) == devices
        trainer.fit((x, y), epochs=2, batch_size=16, callbacks=[first], verbose=2)
        whole = trainer.breakdown
        assert whole.devices == list(trainer.devices)
        assert (first.breakdown.num_steps, whole.num_steps) == (4, 8)
        assert (first.breakdown.num_examples, whole.num_examples) == (61, 122)
        for one, both in zip(first.breakdown.parts, whole.parts, strict=True):
            assert all(0 < one[part] < both[part] for part in ("compute", "update"))
            assert sum(both.values()) <= whole.seconds
        assert "of the step" in capsys.readouterr().out
        trainer.fit((x, y), epochs=1, batch_size=16, verbose=0)
        assert trainer.breakdown is None


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_time_of_an_epoch_that_ends_before_its_data_is_whole(epochs):
    with lockstep.wrap(Dense([6, 8, 3], seed=1), SGD(0.1), "cross_entropy", devices=1, shards=4) as trainer:
        trainer.fit((x, y), epochs=epochs, steps_per_epoch=2, batch_size=16, verbose=2)
        breakdown = trainer.breakdown
    assert breakdown.num_steps == 2 * epochs
    assert 0 < sum(breakdown.parts[0].values()) <= breakdown.seconds
