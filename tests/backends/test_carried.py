"""State from one batch to the next, in every framework that has objectives: the same bits on any number of devices."""

import numpy as np
import pytest

import lockstep
from backends.kit import VALUES, WEIGHTS, X
from backends.test_contract import KITS
from lockstep.core import outputs
from lockstep.errors import BatchError, ModelError, StateError

kits = pytest.mark.parametrize("kit", [pytest.param(kit, id=name) for name, kit in KITS.items() if name != "numpy"])


def square(value):
    return value * value


@lockstep.objective
def remember(model, batch):
    """A running mean of the outputs, whose first half is a state of its own."""
    found = model(batch["x"])
    after = 0.5 * batch["state"]["mean"] + found
    return lockstep.Carried(square(after - batch["y"]), {"mean": after, "last": (found, batch["index"])})


def wrap(kit, loss=remember, devices=1, shards=8):
    model = kit.model(WEIGHTS)
    return lockstep.wrap(model, kit.sgd(model, 0.1, 0.9), loss, devices=devices, shards=shards, threads=1)


def batch(size, state=None, start=0):
    rows = slice(start, start + size)
    first = {"mean": np.zeros_like(VALUES[rows])}
    return {"x": X[rows], "y": VALUES[rows], "index": np.arange(size), "state": first if state is None else state}


def to_numpy(trainer, state):
    host = trainer.session.backend.host
    return [host(state["mean"]), *map(host, state["last"])]


@kits
@pytest.mark.parametrize("size", [20, 5])
def test_the_next_batch_starts_from_the_state_of_the_whole_batch(kit, size):
    """With 5 examples and 8 shards some shards, and whole devices, have none."""
    found = []
    for devices in (1, 3):
        with wrap(kit, devices=devices) as trainer:
            assert len(trainer.devices) == devices
            records, state = [], None
            for step in range(3):
                carried = trainer.step(batch(size, state, size * step), verbose=0).carried
                mean, last, index = to_numpy(trainer, carried)
                assert mean.shape == last.shape == (size, VALUES.shape[1])
                assert index.tolist() == list(range(size))
                records.append((mean.tobytes(), last.tobytes()))
                state = {"mean": carried["mean"]}
            found.append((records, trainer.digest()))
    assert found[0] == found[1]


@kits
def test_the_state_is_that_of_the_plain_model(kit):
    with wrap(kit, shards=4) as trainer:
        expected = trainer.predict(X[:10])
        logs = trainer.step(batch(10), verbose=0)
        np.testing.assert_allclose(to_numpy(trainer, logs.carried)[1], expected, rtol=1e-12)
        second = trainer.predict(X[10:20])
        mean = to_numpy(trainer, logs.carried)[0]
        logs = trainer.step(batch(10, {"mean": logs.carried["mean"]}, 10), verbose=0)
        np.testing.assert_allclose(to_numpy(trainer, logs.carried)[0], 0.5 * mean + second, rtol=1e-12)


@kits
def test_gradients_and_metrics_carry_too(kit):
    @lockstep.objective
    def measured(model, batch):
        found = model(batch["x"])
        return lockstep.Carried(square(found - batch["y"]), found), {"size": square(found)}

    with wrap(kit, measured, devices=2) as trainer:
        rows = trainer.predict(X[:12])
        logs = trainer.gradients(batch(12), verbose=0).logs
        assert logs["size"] == pytest.approx((rows**2).mean())
        np.testing.assert_allclose(trainer.session.backend.host(logs.carried), rows, rtol=1e-12)
        assert trainer.evaluate([batch(12)])["size"] == pytest.approx((rows**2).mean())  # which drops the state


@kits
def test_fit_refuses_state_and_changes_nothing(kit):
    with wrap(kit, devices=2) as trainer:
        trainer.predict(X[:8])  # a model may have no variables before
        before = trainer.digest()
        with pytest.raises(
            ModelError, match=r"returned lockstep.Carried, but fit reads its batches ahead .*state = logs\.carried"
        ):
            trainer.fit([batch(12)], verbose=0)
        assert trainer.digest() == before
        assert trainer.step(batch(12), verbose=0).carried is not None


@kits
@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda found: found[None], "for a shard of 3"),
        (lambda found: (found, 1.0), r", float\) for a shard of 3"),
        (lambda found: (), r"Got \(\) for a shard of 3"),
        (lambda found: [found], "Got list of 1 for a shard of 3"),
    ],
)
def test_state_without_a_row_for_each_example_is_refused(kit, state, words):
    @lockstep.objective
    def loss(model, batch):
        found = model(batch["x"])
        return lockstep.Carried(square(found - batch["y"]), state(found))

    with wrap(kit, loss, shards=4) as trainer, pytest.raises(ModelError, match=words) as caught:
        trainer.step(batch(12), verbose=0)
    assert "Swap the axes of a state with its examples elsewhere" in str(caught.value)


@kits
@pytest.mark.parametrize("devices", [1, 3])
def test_state_in_some_shards_only_is_refused(kit, devices):
    @lockstep.objective
    def loss(model, batch):
        found = model(batch["x"])
        squares = square(found - batch["y"])
        return lockstep.Carried(squares, found) if tuple(batch["x"].shape) == (3, 6) else squares

    with (
        wrap(kit, loss, devices, shards=3) as trainer,
        pytest.raises(ModelError, match=r"no state for shard \d.* Return lockstep.Carried\(loss, state\) in every"),
    ):
        trainer.step(batch(8), verbose=0)


@kits
def test_what_gives_no_state_says_so(kit):
    form = kit.forms[0]
    model = form.model()
    with lockstep.wrap(model, kit.sgd(model, 0.1), form.loss, shards=2, threads=1) as trainer:
        logs = trainer.step(form.batch, verbose=0)
        with pytest.raises(StateError, match=r"gives no state for the next batch\. Return lockstep.Carried"):
            _ = logs.carried


@kits
def test_state_above_the_limit_is_refused_and_changes_nothing(kit, monkeypatch):
    with wrap(kit, shards=2) as trainer:
        trainer.predict(X[:8])
        before = trainer.digest()
        monkeypatch.setattr(outputs, "LIMIT", 2**10)
        with pytest.raises(BatchError, match=r"The carried state of this batch of 24 examples has .* Carry less"):
            trainer.step(batch(24), verbose=0)
        assert trainer.digest() == before
