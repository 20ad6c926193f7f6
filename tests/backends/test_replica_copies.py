"""`trainer.copies`: one array of the state as it lies on each device, in every framework."""

import hashlib
import importlib
import os

import pytest

import lockstep
from backends.kit import LABELS, WEIGHTS, X
from lockstep.errors import DivergedError, StateError

KITS = {
    name: importlib.import_module(f"backends.kits.{name}")
    for name in os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")
}


@pytest.fixture(params=KITS, scope="module")
def trainer(request):
    kit = KITS[request.param]
    model = kit.model(WEIGHTS)
    optimizer = kit.sgd(model, 0.1, 0.9)
    with lockstep.wrap(model, optimizer, kit.cross_entropy(), devices=["cpu"] * 3, shards=4) as made:
        made.step((X, LABELS))
        yield made


def bits(array):
    return hashlib.sha256(array.dtype.encode() + array.data.tobytes()).hexdigest()


def test_every_device_has_the_weights_of_the_last_step(trainer):
    assert len(trainer.devices) == 3
    for _ in range(2):
        before = trainer.state()
        trainer.step((X, LABELS))
        after = trainer.state()
        for name in after:
            assert [bits(copy) for copy in trainer.copies(name)] == [bits(after[name])] * 3
        assert any(bits(before[name]) != bits(after[name]) for name in after if name.startswith("model."))


def test_probing_the_loss_does_not_change_the_state(trainer):
    before = trainer.digest()
    trainer.copies(next(iter(trainer.state())))
    assert trainer.digest() == before


def test_an_unknown_name_is_refused_with_the_known_ones(trainer):
    with pytest.raises(StateError) as raised:
        trainer.copies("nobody")
    assert str(raised.value).startswith("The state has no array 'nobody'. Use one of model.")


def test_a_replica_that_differs_is_named_by_the_digest(trainer, monkeypatch):
    """One bit of the copy of this process's last replica, as a device that computes wrongly would leave it."""
    backend = type(trainer.session.backend)
    copies = backend.copies

    def turned(self):
        *others, last = copies(self)
        name, array = next(iter(last.items()))
        wrong = array.data.copy()
        wrong.reshape(-1).view("uint8")[0] ^= 1
        return iter([*others, {**last, name: array._replace(data=wrong)}])

    monkeypatch.setattr(backend, "copies", turned)
    other = (
        "cpu:2" if len(trainer.session.backend.devices) == 3 else "cpu:1"
    )  # alone in its process, cpu:0 itself is wrong
    with pytest.raises(DivergedError, match=rf"on {other} differs from cpu:0 after step \d+"):
        trainer.digest()
