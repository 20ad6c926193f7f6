"""A linen module without variables before its first batch, and a state that was loaded before them."""

import flax.linen as nn
import numpy as np
import optax
import pytest

import lockstep
from backends.kits import jax as kit
from lockstep.errors import StateError

assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels
GENERATOR = np.random.Generator(np.random.PCG64(5))
X = GENERATOR.standard_normal((61, 6)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 61)


class Dotted(nn.Module):
    """A layer whose name has a dot."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="a.b")(x)


class Deep(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dense(4)(x))


def made(module=None, count=1, tx=None):
    return lockstep.wrap(module or nn.Dense(3), tx or optax.adam(0.1), LOSS, devices=count, shards=8)


@pytest.mark.parametrize("module", [nn.Dense(3), Dotted()], ids=["plain", "a dot in a name"])
def test_a_linen_model_restores_before_its_first_batch(tmp_path, module):
    one, other = made(module), made(module, 4)
    one.step((X, Y))
    one.save(tmp_path / "one")
    other.restore(tmp_path / "one")
    assert other.digest() == one.digest()
    other.save(tmp_path / "other")
    third = made(module, 2)
    third.restore(tmp_path / "other")
    for trainer in (one, other, third):
        trainer.step((X, Y))
    assert one.digest() == other.digest() == third.digest()


def test_a_state_of_another_model_is_refused_at_the_first_batch():
    """At every batch, until a state that fits is loaded."""
    one, other = made(), made(Deep())
    one.step((X, Y))
    other.load_state(one.state())
    for call in (other.step, other.step, other.evaluate):
        with pytest.raises(StateError, match=r"does not fit this model: 'params.Dense_0.bias' is missing"):
            call((X, Y))
    assert other.digest() == made_with(one).digest()
    fitting = made(Deep())
    fitting.step((X, Y))
    other.load_state(fitting.state())
    other.step((X, Y))
    fitting.step((X, Y))
    assert other.digests() == fitting.digests()


def made_with(trainer):
    """Returns another trainer with the pending state of this one."""
    other = made()
    other.load_state(trainer.state())
    return other


def test_a_pending_state_belongs_to_one_trainer():
    one = made()
    one.step((X, Y))
    state = one.state()
    other = made()
    other.load_state(state)
    before = other.digest()
    for given in (state, other.state()):
        given["model.params.bias"].data[:] = 7
    assert other.digest() == before


def test_the_learning_rate_set_last_is_used(tmp_path):
    def injected(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    one = made(tx=injected(0.25))
    one.step((X, Y))
    one.save(tmp_path / "one")
    for rates in ((0.25,), (0.5,)):
        other = made(tx=injected(0.1))
        other.restore(tmp_path / "one")
        if rates != other.learning_rates:
            other.learning_rates = rates
        assert other.learning_rates == rates
        other.step((X, Y))
        assert other.learning_rates == rates
    for rates in ((0.25,), (0.125,)):  # also where it is what the optimizer began with
        loaded = made(tx=injected(0.125))
        loaded.load_state(one.state())
        assert loaded.learning_rates == (0.25,)
        loaded.learning_rates = rates
        loaded.step((X, Y))
        assert loaded.learning_rates == rates
    loaded = made(tx=injected(0.125))
    loaded.load_state(one.state())
    loaded.step((X, Y))
    assert loaded.learning_rates == (0.25,)


def test_verify_with_a_pending_state():
    one, other = made(), made()
    one.step((X, Y))
    other.load_state(one.state())
    assert other.verify((X, Y), steps=1, devices=(1, 2), batch_size=61).equal
    assert other.digests() == one.digests()
