"""`trainer.gradients` and `trainer.apply` in every framework: together they are a step, on any number of devices."""

import importlib
import os

import numpy as np
import pytest

import lockstep
from lockstep.errors import BatchError

KITS = {
    name: importlib.import_module(f"backends.kits.{name}")
    for name in os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
}
kits = pytest.mark.parametrize("kit", [pytest.param(kit, id=name) for name, kit in KITS.items()])


def wrap(kit, devices, index=0):
    form = kit.forms[index]
    model = form.model()
    return lockstep.wrap(
        model, kit.sgd(model, 0.1, 0.9), form.loss, metrics=form.metrics, devices=devices, shards=4, threads=1
    )


def batch(kit, index):
    first, *others = kit.forms[0].batch
    return tuple(each[16 * index : 16 * index + 16] for each in (first, *others))


@kits
@pytest.mark.parametrize("devices", [1, 3])
def test_gradients_and_their_update_are_the_step(kit, devices):
    with wrap(kit, 1) as plain, wrap(kit, devices) as split:
        for index in range(2):
            logs = plain.step(batch(kit, index), verbose=0)
            before = split.digest() if index else None  # a model may have no variables before the first batch
            gradients = split.gradients(batch(kit, index), verbose=0)
            assert dict(gradients.logs) == dict(logs)
            assert before is None or split.digest() == before
            split.apply(gradients)
            assert split.digest() == plain.digest()
        assert split.num_steps == 2


@kits
def test_a_loss_with_a_denominator_of_its_own(kit):
    """Its gradient is divided once, after the tree."""
    index = next(index for index, form in enumerate(kit.forms) if form.name == "ignored targets")
    first, *others = kit.forms[index].batch
    part = (first[:16], *(each[:16] for each in others))
    with wrap(kit, 1, index) as plain, wrap(kit, 2, index) as split:
        for _ in range(2):
            plain.step(part, verbose=0)
            split.apply(split.gradients(part, verbose=0))
            assert split.digest() == plain.digest()


@kits
def test_changed_gradients_are_what_every_replica_gets(kit):
    with wrap(kit, 1) as one, wrap(kit, 2) as several:
        start = {}
        for trainer in (one, several):
            gradients = trainer.gradients(batch(kit, 0), verbose=0)
            start = {name: np.array(array) for name, (array, _) in trainer.state().items()}
            for name, value in gradients.items():
                gradients[name] = value * 0 + 1
            trainer.apply(gradients)
        assert several.digest() == one.digest()
        for name in gradients:
            after = one.state()[f"model.{name}"].data
            np.testing.assert_allclose(start[f"model.{name}"] - after, 0.1, atol=1e-6)


@kits
def test_gradients_that_do_not_fit_change_nothing(kit):
    with wrap(kit, 1) as trainer:
        gradients = trainer.gradients(batch(kit, 0), verbose=0)
        before = trainer.digest()
        name = next(iter(gradients))
        with pytest.raises(BatchError, match=r"takes what trainer.gradients\(batch\) has returned"):
            trainer.apply(dict(gradients))
        value = gradients.pop(name)
        with pytest.raises(BatchError, match=f"Only the gradients or only the trained parameters contain {name}"):
            trainer.apply(gradients)
        gradients[name] = np.zeros((7, 7))
        with pytest.raises(BatchError, match=r"must have the shape .* Got \(7, 7\)"):
            trainer.apply(gradients)
        assert (trainer.digest(), trainer.num_steps) == (before, 0)
        gradients[name] = value
        trainer.apply(gradients)
        assert trainer.num_steps == 1
