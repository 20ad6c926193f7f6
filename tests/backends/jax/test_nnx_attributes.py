"""Attributes of an nnx module beside its arrays: scalars and strings may change, others must not."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax.nnx_attributes import NnxAttributes
from lockstep.errors import ModelError, StateError

assert kit.module  # has made the CPU devices
GENERATOR = np.random.Generator(np.random.PCG64(5))
X = GENERATOR.standard_normal((23, 6)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 23)


class Scaled(nnx.Module):
    """One layer, a scalar and a function."""

    def __init__(self):
        self.layer = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        self.scale = 1.0
        self.act = lambda x: x

    def __call__(self, x):
        return self.act(self.layer(x)) * self.scale


def wrapped(model, rate=0.0, **more):
    return lockstep.wrap(model, optax.sgd(rate), "cross_entropy", shards=4, **more)


@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_written_together_with_a_scalar_is_used(count):
    model = Scaled()
    trainer = wrapped(model, devices=count)
    trainer.step((X, Y))
    model.layer.kernel[...] = jnp.zeros((6, 3), jnp.float32)
    model.scale = 2.0
    trainer.step((X, Y))
    assert not np.asarray(model.layer.kernel[...]).any()
    assert not trainer.state()["model.layer.kernel"].data.any()


@pytest.mark.parametrize("value", [2.0, 1, True, -1.0])
def test_a_changed_scalar_is_used_in_the_next_step(value):
    model = Scaled()
    trainer = wrapped(model)
    trainer.step((X, Y))
    model.scale = value
    plain = Scaled()
    plain.scale = value
    assert trainer.step((X, Y))["loss"] == wrapped(plain).step((X, Y))["loss"]


def test_values_of_another_type_or_sign_count_as_changes():
    """They are equal in Python, but different constants in an executable."""
    model = Scaled()
    attributes = NnxAttributes(model)
    texts = []
    for value in (1.0, 1, True, "1", 0.0, -0.0, None):
        model.scale = value
        texts.append(attributes.read())
    assert len(set(texts)) == len(texts)


def test_a_replaced_function_is_refused_even_at_the_same_address():
    model = Scaled()
    trainer = wrapped(model)
    trainer.step((X, Y))
    address = id(model.act)
    for _ in range(100):
        model.act = None  # frees the old one, unless a reference to it is kept
        model.act = lambda x: x * 0
        if id(model.act) == address:
            break
    with pytest.raises(ModelError, match="'act' was replaced, added or removed"):
        trainer.step((X, Y))


def test_a_scalar_cannot_become_an_array_nor_an_array_a_scalar():
    """A change of an array that is a constant in an executable would not be noticed."""
    model = Scaled()
    trainer = wrapped(model)
    model.scale = nnx.data(jnp.asarray(2.0))
    with pytest.raises(ModelError, match="'scale' was replaced, added or removed"):
        trainer.step((X, Y))
    model.scale = 2.0
    trainer.step((X, Y))


@pytest.mark.parametrize("count", [1, 2])
def test_a_checkpoint_saves_scalars(count, tmp_path):
    one = wrapped(Scaled(), 0.1)
    one.step((X, Y))
    one.model.scale = 2.0
    one.save(tmp_path / "saved")
    one.step((X, Y))
    two = wrapped(Scaled(), 0.1, devices=count)
    assert len(two.devices) == count
    two.step((X, Y))
    two.restore(tmp_path / "saved")
    assert two.model.scale == 2.0
    two.step((X, Y))
    assert two.digest() == one.digest()


def test_a_checkpoint_with_scalars_of_an_unknown_module_is_refused(tmp_path):
    trainer = wrapped(Scaled())
    with pytest.raises(
        StateError, match=r"^The checkpoint does not fit this model: it has the state .* of a module 'other', "
    ):
        trainer.session.backend.set_attributes({"model": '{"other": {"rate": 0.5}}'})
