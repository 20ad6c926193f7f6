"""Optimizers of optax and flax beyond a plain transformation."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import lockstep
from backends.kits import jax as kit
from lockstep.errors import OptimizerError

assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels
X, Y = np.ones((8, 6), np.float32), np.zeros(8, np.int64)


def net():
    return nnx.Linear(6, 3, rngs=nnx.Rngs(0))


def state(kind=TrainState, wrapped=lambda params: params):
    params = nn.Dense(3).init(jax.random.key(0), X)["params"]
    return kind.create(apply_fn=nn.Dense(3).apply, params=wrapped(params), tx=optax.adam(0.1))


def kernel_alone(params):
    return jax.tree.map_with_path(lambda path, _: "kernel" in str(path), params)


def test_an_nnx_optimizer_may_leave_parameters_out():
    tx = optax.masked(optax.adam(0.1), kernel_alone)
    model, other = net(), net()
    owner = nnx.Optimizer(model, tx, wrt=nnx.Param)
    held = lockstep.wrap(model, owner, LOSS, shards=2)
    plain = lockstep.wrap(other, tx, LOSS, shards=2)
    for trainer in (held, plain):
        trainer.step((X, Y))
        trainer.step((X, Y))
    assert int(owner.step[...]) == 2
    assert model.kernel[...].tobytes() == other.kernel[...].tobytes()


def test_gradients_may_be_accumulated_over_steps():
    tx = optax.MultiSteps(optax.sgd(0.1), 2)
    trainer = lockstep.wrap(net(), tx, LOSS, shards=2)
    before = trainer.digests()["model.kernel"]
    trainer.step((X, Y))
    assert trainer.digests()["model.kernel"] == before
    trainer.step((X, Y))
    assert trainer.digests()["model.kernel"] != before


def plateau():
    return optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))


@pytest.mark.parametrize("held", [False, True], ids=["alone", "in a TrainState"])
def test_accumulated_steps_may_use_the_loss(held):
    tx = optax.MultiSteps(plateau(), 2)
    if held:
        params = nn.Dense(3).init(jax.random.key(0), X)["params"]
        trainer = lockstep.wrap(TrainState.create(apply_fn=nn.Dense(3).apply, params=params, tx=tx), None, LOSS)
    else:
        trainer = lockstep.wrap(net(), tx, LOSS)
    trainer.step((X, Y))
    assert np.isfinite(trainer.step((X, Y))["loss"])


def test_a_transformation_gets_the_arguments_it_accepts():
    """This one takes named arguments, but not the loss."""
    trainer = lockstep.wrap(net(), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), LOSS, shards=2)
    losses = [trainer.step((X, Y))["loss"] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_a_plain_transformation_gets_three_arguments():
    def update(updates, state, params=None, **more):
        assert not more
        return updates, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    assert np.isfinite(lockstep.wrap(net(), tx, LOSS, shards=2).step((X, Y))["loss"])


def test_a_state_of_plain_numbers():
    model = net()
    tx = optax.GradientTransformation(lambda params: Steps(1.0), lambda updates, state, params=None: (updates, state))
    owner = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert np.isfinite(lockstep.wrap(model, owner, LOSS, shards=2).step((X, Y))["loss"])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_line_search_is_refused(shards):
    trainer = lockstep.wrap(net(), optax.lbfgs(), LOSS, shards=shards)
    before = trainer.digest()
    with pytest.raises(OptimizerError, match=r"^The optimizer needs more than .*'value_fn'. Use an optimizer without"):
        trainer.step((X, Y))
    assert trainer.digest() == before


def test_a_state_is_initialized_from_jax_arrays():
    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda value: value.at[0].set(1.0), params),
        lambda updates, state, params=None: (updates, state),
    )
    trainer = lockstep.wrap((nn.Dense(3), nn.Dense(3).init(jax.random.key(0), X)), tx, LOSS, shards=2)
    trainer.step((X, Y))
    assert (trainer.state()["optimizer.kernel"].data[0] == 1).all()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_state_that_changes_its_shape_or_type_is_refused(shards):
    tx = optax.GradientTransformation(
        lambda params: Steps(jnp.zeros((), "int32")),
        lambda updates, state, params=None: (updates, Steps(state.step.astype("float32"))),
    )
    trainer = lockstep.wrap(net(), tx, LOSS, shards=shards)
    with pytest.raises(
        OptimizerError, match=r"'step' is \(\) of int32 after init and \(\) of float32 after an update\. Change"
    ):
        trainer.step((X, Y))


def test_labels_for_parameters_that_do_not_exist_yet():
    labels = {"kernel": "trained", "bias": "left"}
    tx = optax.multi_transform({"trained": optax.adam(0.1), "left": optax.set_to_zero()}, labels)
    trainer = lockstep.wrap(nn.Dense(3), tx, LOSS, shards=2)
    assert trainer.learning_rates == ()
    trainer.step((X, Y))
    assert not trainer.state()["model.params.bias"].data.any()


class Steps(NamedTuple):
    """A state with a field of the name of flax's counter."""

    step: jax.Array


def test_a_state_of_optax_may_count_steps_too():
    tx = optax.GradientTransformation(
        lambda params: Steps(jnp.full((), 0.5)),
        lambda updates, state, params=None: (jax.tree.map(jnp.negative, updates), Steps(state.step + 1)),
    )
    params = nn.Dense(3).init(jax.random.key(0), X)["params"]
    given = TrainState.create(apply_fn=nn.Dense(3).apply, params=params, tx=tx)
    trainer = lockstep.wrap(given, None, LOSS, shards=2)
    trainer.step((X, Y))
    before = trainer.digest()
    trainer.load_state(trainer.state())
    assert trainer.digest() == before
    found = trainer.model.state
    assert (int(found.step), float(found.opt_state.step)) == (1, 1.5)


def test_a_train_state_of_frozen_parameters():
    trainer = lockstep.wrap(state(wrapped=freeze), None, LOSS, shards=2)
    trainer.step((X, Y))
    found = trainer.model.state
    found.apply_gradients(grads=found.params)  # parameters and slots in nests of one kind


def test_a_train_state_with_another_optimizer_is_refused():
    with pytest.raises(OptimizerError, match=r"wrap\(\) was also given GradientTransformation"):
        lockstep.wrap(state(), optax.sgd(0.1), LOSS)


class Averaging(TrainState):
    """Overrides `apply_gradients` to do more than `tx`."""

    def apply_gradients(self, *, grads, **more):
        return super().apply_gradients(grads=grads, **more)


class Doubling(nnx.Optimizer):
    """Overrides `update` to do something else than `tx`."""

    def update(self, model, grads, **more):
        super().update(model, jax.tree.map(lambda value: 2 * value, grads), **more)


def test_an_overridden_update_is_refused():
    with pytest.raises(
        OptimizerError, match=r"Averaging.apply_gradients would not be called, because a step only calls the optax"
    ):
        lockstep.wrap(state(Averaging), None, LOSS)
    model = net()
    with pytest.raises(
        OptimizerError,
        match=r"Doubling.update would not be called, .*Do what this method does in tx, e.g. with optax.chain",
    ):
        lockstep.wrap(model, Doubling(model, optax.sgd(0.1), wrt=nnx.Param), LOSS)
    both = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)  # flax's own
    assert np.isfinite(lockstep.wrap(model, both, LOSS, shards=2).step((X, Y))["loss"])
