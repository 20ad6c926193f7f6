"""Programs: what is shared between models of a process, and what is let go."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax import programs

assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels
X, Y = np.ones((8, 6), np.float32), np.zeros(8, np.int64)


def calling(factor):
    """An `apply` that asks Python for its inputs times a factor."""

    def apply(params, x):
        asked = jax.pure_callback(
            lambda x: np.asarray(x) * np.float32(factor), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return jax.lax.stop_gradient(asked) @ params

    return apply


def test_every_model_calls_back_its_own_function():
    for factor in (1, 3):
        trainer = lockstep.wrap((calling(factor), jnp.ones((6, 3))), optax.sgd(0.1), LOSS, shards=1)
        np.testing.assert_array_equal(trainer.predict(X), np.full((8, 3), 6 * factor))


def test_functions_are_called_back_from_every_device():
    def digest(count):
        trainer = lockstep.wrap((calling(2), jnp.ones((6, 3))), optax.sgd(0.1), LOSS, devices=count, shards=2)
        trainer.step((X, Y))
        return trainer.digest()

    assert digest(1) == digest(2)


def test_code_is_let_go_with_its_devices(monkeypatch):
    from lockstep.backends.jax import devices

    monkeypatch.setattr(devices, "clear", lambda: None)
    monkeypatch.setattr(devices, "_pools", {})
    monkeypatch.setattr(programs, "_CODES", programs.OrderedDict(one="code"))
    devices._clear()
    assert not programs._CODES


@pytest.mark.parametrize("read", ["loss", "grad_norm"])
def test_leaves_are_let_go_after_the_step(read):
    trainer = lockstep.wrap((lambda params, x: x @ params, jnp.ones((6, 3))), optax.sgd(0.1), LOSS, shards=4)
    assert np.isfinite(trainer.step((X, Y))[read])
    gc.collect()
    (length,) = trainer._backend._fields.lengths.values()
    assert sum(array.shape[-1:] == (length,) for array in jax.live_arrays()) == 1  # the total
