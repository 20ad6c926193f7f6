"""A batch of one shard, whose step is one program."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from lockstep.backends.jax import executables
from lockstep.errors import NonFiniteError, StateError

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = np.arange(16) % 3
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Noisy(nn.Module):
    """Batch norm, dropout and a layer."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def wrapped(tx=None, **options):
    module = Noisy()
    variables = module.init(jax.random.key(0), X, train=False)
    return lockstep.wrap((module, variables), tx or optax.adam(0.1), LOSS, shards=1, **options)


@pytest.fixture
def programs(monkeypatch):
    """The kinds of programs that were used."""
    asked = []
    once = executables.Executables._find

    def counted(self, key, make):
        asked.append(key[0])
        return once(self, key, make)

    monkeypatch.setattr(executables.Executables, "_find", counted)
    return asked


def test_the_step_of_one_shard_is_one_program(programs):
    with wrapped(clip_norm=0.1, metrics=["accuracy"]) as trainer:
        for _ in range(3):
            assert np.isfinite(trainer.step((X, Y))["accuracy"])
    assert programs == ["step"] * 3


def test_the_gradient_is_computed_when_it_is_read(programs):
    """As with several shards: the norm before clipping, of the same parameters and the same dropout."""
    with wrapped(clip_norm=0.1) as trainer, wrapped(asking(), clip_norm=0.1) as other:
        logs, others = trainer.step((X, Y)), other.step((X, Y))
        assert logs["loss"] == others["loss"]
        assert logs["grad_norm"] == others["grad_norm"]
    assert programs.count("step") == programs.count("update") == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_a_gradient_is_of_the_loss_as_it_was_traced(shards):
    """A loss reads variables around it once, when it is traced, for the step and for the gradient."""
    beta = 1.0

    @lockstep.objective
    def loss(model, batch):
        return beta * (model(batch[0]) ** 2).mean()

    def apply(variables, x):
        return x @ variables

    with lockstep.wrap((apply, np.ones((6, 3), np.float32)), optax.sgd(0.0), loss, shards=shards) as trainer:
        before = trainer.step((X, Y))
        beta = 100.0
        logs = trainer.step((X, Y))
        norm = logs["grad_norm"]
        assert logs["loss"] == before["loss"]
        beta = 1.0
    with lockstep.wrap((apply, np.ones((6, 3), np.float32)), optax.sgd(0.0), loss, shards=shards) as trainer:
        assert trainer.step((X, Y))["grad_norm"] == norm


def test_a_gradient_is_of_the_batch_before_the_script_changed_it():
    """A script that reads every batch into the same memory may read the gradient after it has written there."""
    batch = X.copy()
    with wrapped() as trainer, wrapped() as other:
        logs, others = trainer.step((batch, Y)), other.step((X, Y))
        batch[:] = 100.0
        assert logs["grad_norm"] == others["grad_norm"]


def asking():
    """Adam and a transformation that uses the loss, so that gradient and update are two programs."""

    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda each: each + 0 * value, updates), state

    looks = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    return optax.chain(optax.adam(0.1), looks)


def test_a_gradient_cannot_be_read_after_the_next_step():
    with wrapped() as trainer:
        logs = trainer.step((X, Y))
        with pytest.raises(NonFiniteError):
            trainer.step((np.full_like(X, np.nan), Y))
        with pytest.raises(StateError, match=r"The gradient of step \d+ is no longer in memory"):
            logs["grad_norm"]


def test_a_loss_that_is_not_finite_changes_nothing():
    with wrapped() as trainer:
        trainer.step((X, Y))
        before = trainer.digest()
        with pytest.raises(NonFiniteError):
            trainer.step((np.full_like(X, np.nan), Y))
        assert trainer.digest() == before
        trainer.step((X, Y))
        assert trainer.digest() != before


def test_running_statistics_change_and_other_variables_stay():
    class Counted(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=nnx.Rngs(0))
            self.still = nnx.Variable(np.float32(-0.0))

        def __call__(self, x):
            return self.layer(self.norm(x)) + self.still[...]

    model = Counted()
    with lockstep.wrap(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), LOSS, shards=1) as trainer:
        trainer.step((X, Y))
        state = trainer.state()
    assert state["model.norm.mean"].data == pytest.approx(0.5 * X.mean(0), abs=1e-6)
    assert state["model.still"].data.tobytes() == np.float32(-0.0).tobytes()
    assert np.array(model.norm.mean[...]).tobytes() == state["model.norm.mean"].data.tobytes()
