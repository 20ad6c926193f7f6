"""`lockstep.EMA` in every framework: the bits of numpy's arithmetic, on any number of devices and after a resume.

LOCKSTEP_BACKENDS chooses the frameworks; one that was asked for and cannot be imported fails.
"""

import hashlib
import importlib
import os

import numpy as np
import pytest

import lockstep
from lockstep.callbacks.base import NO_LOGS, Callback

KITS = {
    name: importlib.import_module(f"backends.kits.{name}")
    for name in os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
}
DECAY = 0.9

kits = pytest.mark.parametrize("kit", [pytest.param(kit, id=name) for name, kit in KITS.items()])


class HostEMA(Callback):
    """The same average, computed by numpy from a copy of the whole state after every step."""

    def __init__(self):
        self.arrays = {}

    def on_train_batch_end(self, batch, logs=NO_LOGS):
        for name, (data, dtype) in self.trainer.state().items():
            if name.startswith("model."):
                number = np.dtype(dtype).type
                old = self.arrays.get(name)
                self.arrays[name] = data if old is None else old * number(DECAY) + data * number(1 - DECAY)


def digest(arrays):
    return {
        name: hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
        for name, array in arrays.items()
    }


def fit(kit, callbacks, devices=1, epochs=2, **options):
    form = kit.forms[0]
    model = form.model()
    with lockstep.wrap(
        model, kit.sgd(model, 0.1), form.loss, metrics=form.metrics, devices=devices, shards=4, threads=1
    ) as trainer:
        assert len(trainer.devices) == devices
        trainer.fit(form.batch, epochs=epochs, batch_size=16, callbacks=callbacks, verbose=0, **options)


@kits
def test_the_averages_have_the_bits_of_numpys_arithmetic(kit):
    ema, host = lockstep.EMA(DECAY), HostEMA()
    fit(kit, [ema, host])
    assert digest(ema.arrays) == digest(host.arrays)
    assert {array.dtype.name for array in ema.arrays.values()} == {"float64"}  # the contract computes in it


@kits
def test_the_averages_do_not_depend_on_the_number_of_devices(kit):
    one, several = lockstep.EMA(DECAY), lockstep.EMA(DECAY)
    fit(kit, [one])
    fit(kit, [several], devices=3)
    assert digest(several.arrays) == digest(one.arrays)


@kits
def test_resumed_averages_continue(kit, tmp_path):
    whole, first, second = (lockstep.EMA(DECAY) for _ in range(3))
    fit(kit, [whole], epochs=3)
    fit(kit, [first], epochs=1, checkpoint=tmp_path)
    fit(kit, [second], epochs=3, checkpoint=tmp_path)
    assert digest(second.arrays) == digest(whole.arrays)
