"""The update that starts before the sums are read, as on an accelerator: it gives the same bits and can be dropped."""

import mmap

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from lockstep.backends.jax import executables, replicas
from lockstep.errors import NonFiniteError

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = np.arange(16) % 3
LOSS = optax.softmax_cross_entropy_with_integer_labels


@pytest.fixture
def updates(monkeypatch):
    """One entry for each update: True if it was started early, which donates nothing."""
    made = []
    updated = replicas.JaxReplicas._run_update

    def counted(self, total, differs, loss, donate_argnums):
        made.append(not donate_argnums)
        return updated(self, total, differs, loss, donate_argnums)

    monkeypatch.setattr(replicas.JaxReplicas, "_run_update", counted)
    return made


def trained(tx, batch=(X, Y), **options):
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    with lockstep.wrap(model, tx, LOSS, devices=2, shards=4, **options) as trainer:
        for _ in range(3):
            trainer.step(batch)
        return trainer.digest()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}], ids=str)
def test_an_early_update_gives_the_same_bits(options, updates, monkeypatch):
    usual = trained(optax.adam(0.1), **options)
    assert updates == [False] * 3
    monkeypatch.setattr(replicas, "is_asynchronous", lambda device: True)
    assert trained(optax.adam(0.1), **options) == usual
    assert updates == [False] * 3 + [True] * 3


def test_a_loss_that_is_not_finite_changes_nothing(updates, monkeypatch):
    monkeypatch.setattr(replicas, "is_asynchronous", lambda device: True)
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    trainer = lockstep.wrap(model, optax.adam(0.1), LOSS, devices=2, shards=4)
    trainer.step((X, Y))
    before = trainer.digest()
    with pytest.raises(NonFiniteError):
        trainer.step((np.full_like(X, np.nan), Y))
    assert trainer.digest() == before
    trainer.step((X, Y))
    assert updates == [True] * 3


def test_an_update_that_needs_the_sums_is_not_started_early(updates, monkeypatch):
    monkeypatch.setattr(replicas, "is_asynchronous", lambda device: True)
    trained(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
    trained(optax.sgd(0.1), (X, Y, np.linspace(0.0, 1.0, 16)))  # divided by the weights
    assert updates == [False] * 6


def test_weights_that_sum_to_one_need_no_division(updates, monkeypatch):
    """Nothing is left to divide, as without weights, but this is known only after the sums are read."""
    monkeypatch.setattr(replicas, "is_asynchronous", lambda device: True)
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    owner = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with lockstep.wrap(model, owner, LOSS, devices=2, shards=4) as trainer:
        trainer.step((X, Y))
        for weight in (0.25, 1 / 16):
            trainer.step((X, Y, np.full(16, weight, np.float32)))
    assert len(updates) == 3


def test_what_is_put_on_a_device_shares_no_memory_with_numpy():
    """The root of a sum is written again by the next step, while the update may still read it."""
    shared = np.frombuffer(mmap.mmap(-1, 2**16), np.float32)  # aligned to pages, as the memory of an exchange
    (copy,) = executables.Executables(jax.devices("cpu")[:1], True).put({"root": shared})
    shared[:] = 1
    assert not np.asarray(copy["root"]).any()
