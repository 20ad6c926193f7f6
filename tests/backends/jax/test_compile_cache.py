"""Compiled programs: which of them models of a process share, and what is freed."""

import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax import compile_cache

assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels
X, Y = np.ones((8, 6), np.float32), np.zeros(8, np.int64)


def calling(factor):
    """Returns an `apply` that calls back into Python for its inputs times a factor."""

    def apply(params, x):
        asked = jax.pure_callback(
            lambda x: np.asarray(x) * np.float32(factor), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return jax.lax.stop_gradient(asked) @ params

    return apply


def test_programs_with_callbacks_are_not_shared_between_models():
    for factor in (1, 3):
        trainer = lockstep.wrap((calling(factor), jnp.ones((6, 3))), optax.sgd(0.1), LOSS, shards=1)
        np.testing.assert_array_equal(trainer.predict(X), np.full((8, 3), 6 * factor))


def test_callbacks_run_from_every_device():
    def digest(count):
        trainer = lockstep.wrap((calling(2), jnp.ones((6, 3))), optax.sgd(0.1), LOSS, devices=count, shards=2)
        trainer.step((X, Y))
        return trainer.digest()

    assert digest(1) == digest(2)


class Pick(nn.Module):
    """A layer over one of two inputs."""

    index: int

    @nn.compact
    def __call__(self, *inputs):
        return nn.Dense(3)(inputs[self.index])


def test_programs_differ_by_unused_arguments():
    """Two programs whose texts differ only in which of two arrays they read."""
    inputs = X, 10 * X
    variables = Pick(0).init(jax.random.key(0), *inputs)
    outputs = [lockstep.wrap((Pick(index), variables), optax.sgd(0.1), LOSS).predict(inputs) for index in (0, 1)]
    np.testing.assert_allclose(outputs[1], 10 * outputs[0], rtol=1e-5)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_string_in_the_batch_selects_the_arrays_that_are_used(shards):
    @lockstep.objective
    def loss(model, batch):
        return (model(batch[batch["use"]]) ** 2).mean()

    trainer = lockstep.wrap((lambda params, x: x @ params, jnp.ones((6, 3))), optax.sgd(0.0), loss, shards=shards)
    one, other = (trainer.step({"a": X, "b": 10 * X, "use": use})["loss"] for use in "ab")
    assert other == pytest.approx(100 * one)


@pytest.mark.parametrize("shards", [1, 2])
def test_unused_arrays_may_change_their_type_between_batches(shards):
    apply = (lambda params, x: x @ params, jnp.ones((6, 3)))
    trainer = lockstep.wrap(apply, optax.sgd(0.1), lambda outputs, targets: (outputs**2).mean(1), shards=shards)
    for targets in (Y, Y.astype(np.float32), np.zeros((8, 2), np.float32)):
        assert np.isfinite(trainer.step((X, targets))["loss"])
        assert np.isfinite(trainer.evaluate((X, targets))["loss"])


def test_a_changed_jax_setting_compiles_again(tmp_path):
    """As in a plain `jit`, which is traced again; the result is that of a run resumed from a checkpoint."""

    def wrapped():
        apply = lambda params, x, *, rngs: x @ params * jax.random.uniform(rngs["dropout"], (len(x), 3))  # noqa: E731
        return lockstep.wrap((apply, jnp.ones((6, 3))), optax.sgd(0.1), LOSS, shards=2)

    trainer, other = wrapped(), wrapped()
    trainer.step((X, Y))
    trainer.save(tmp_path / "one")
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        trainer.step((X, Y))
        other.restore(tmp_path / "one")
        other.step((X, Y))
    assert trainer.digest() == other.digest()


def test_cached_code_is_dropped_with_its_devices(monkeypatch):
    from lockstep.backends.jax import devices

    monkeypatch.setattr(devices, "clear_backends", lambda: None)
    monkeypatch.setattr(devices, "_pools", {})
    monkeypatch.setattr(compile_cache, "_CODES", compile_cache.OrderedDict(one="code"))
    devices._clear()
    assert not compile_cache._CODES


@pytest.mark.parametrize("read", ["loss", "grad_norm"])
def test_partial_sums_are_freed_after_the_step(read):
    trainer = lockstep.wrap((lambda params, x: x @ params, jnp.ones((6, 3))), optax.sgd(0.1), LOSS, shards=4)
    logs = trainer.step((X, Y))
    assert np.isfinite(logs[read])
    gc.collect()
    (length,) = trainer.session.backend.layout().lengths.values()
    assert sum(array.shape[-1:] == (length,) for array in jax.live_arrays()) == 1  # the total, for logs["grad_norm"]
    del logs
    gc.collect()
    assert sum(array.shape[-1:] == (length,) for array in jax.live_arrays()) == 0


@pytest.mark.parametrize("shards", [1, 8])
def test_the_result_does_not_depend_on_the_batchs_memory_address(shards):
    """A program reads the script's memory directly, aligned or not, in either order of the axes."""
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
    """A script may read every batch into the same memory."""
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
