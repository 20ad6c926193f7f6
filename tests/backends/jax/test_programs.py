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


@pytest.mark.parametrize("shards", [1, 8])
def test_where_a_batch_lies_in_memory_is_no_part_of_the_result(shards):
    """A program reads the script's memory itself, aligned or not, in one order of the axes or the other."""
    x, y = np.random.default_rng(0).normal(size=(27, 97)).astype(np.float32), np.arange(27) % 3

    def digest(batch):
        trainer = lockstep.wrap((lambda params, x: x @ params, kernel), optax.sgd(0.1), LOSS, shards=shards)
        for _ in range(2):
            trainer.step((batch, y))
        return trainer.digest()

    def shifted(offset):
        room = np.zeros(x.size + 16, np.float32)[offset : offset + x.size].reshape(x.shape)
        room[:] = x
        return room

    kernel = np.random.default_rng(1).normal(size=(97, 3)).astype(np.float32)
    assert {digest(shifted(offset)) for offset in range(16)} == {digest(np.asfortranarray(x))}


def test_a_step_has_read_its_batch_when_it_ends():
    """A loop may read every batch into the same memory."""
    batches = np.random.default_rng(0).normal(size=(6, 8, 6)).astype(np.float32)

    def digest(memory):
        trainer = lockstep.wrap((lambda params, x: x @ params, jnp.ones((6, 3))), optax.sgd(0.1), LOSS, shards=2)
        for batch in batches:
            room = batch if memory is None else memory
            room[:] = batch
            trainer.step((room, Y))
            if memory is not None:
                memory[:] = np.nan
        return trainer.digest()

    assert digest(np.empty((8, 6), np.float32)) == digest(None)
