"""Float variables that are queues, for which an average over the shards is wrong."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from backends.kits import jax as kit
from lockstep.errors import ModelError

assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels
X = np.random.Generator(np.random.PCG64(0)).standard_normal((24, 5)).astype(np.float32) + 1
Y = np.arange(24) % 3
ROWS = np.random.Generator(np.random.PCG64(1)).standard_normal((48, 5)).astype(np.float32)
BETWEEN = "Update the buffer in the script between two steps, from where it is copied to every replica; or use shards=1"
COPIED = "Use shards=1, with which nothing is averaged; or use an nnx module, whose variables the script can update"


class Queued(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
        self.queue, self.place = nnx.BatchStat(jnp.asarray(ROWS)), nnx.Variable(jnp.asarray(0))

    def __call__(self, x):
        outputs = self.layer(x + self.queue[...].mean())
        self.enqueue(x)
        return outputs

    def enqueue(self, x):
        self.queue[...] = jax.lax.dynamic_update_slice(self.queue[...], x, (self.place[...], 0))
        self.place[...] = (self.place[...] + len(x)) % 48


class Filled(Queued):
    """A queue that the script writes."""

    def __call__(self, x):
        return self.layer(x + self.queue[...].mean())


class Memory(nn.Module):
    """A row for every class; a pass replaces the row of the class of its first example."""

    collection: str = "memory"

    @nn.compact
    def __call__(self, x):
        rows = self.variable(self.collection, "rows", lambda: jnp.asarray(ROWS))
        place = jnp.argmax(x[0])
        outputs = nn.Dense(3)(x + rows.value.mean())
        if self.is_mutable_collection(self.collection):
            rows.value = rows.value.at[place].set(x[0])
        return outputs


def state_of(collection):
    module = Memory(collection)
    return (module, module.init(jax.random.key(0), X[:1]))


CASES = [
    (Queued, "queue", BETWEEN),
    (Memory, "memory.rows", COPIED),
    (lambda: state_of("batch_stats"), "batch_stats.rows", COPIED),
]


def wrapped(model, **options):
    return lockstep.wrap(model, optax.sgd(0.1), LOSS, **{"devices": 1, "shards": 4, **options})


@pytest.mark.parametrize(("make", "name", "way_out"), CASES)
@pytest.mark.parametrize(("devices", "shards"), [(1, 4), (2, 2)])
def test_a_queue_is_refused(make, name, way_out, devices, shards):
    with wrapped(make(), devices=devices, shards=shards) as trainer:
        assert len(trainer.devices) == devices
        trainer.predict(X)  # makes a module's variables
        before = trainer.digest()
        with pytest.raises(ModelError) as caught:
            trainer.step((X, Y))
        assert (
            f"replaces some slices of the buffer {name!r} of shape (48, 5) along axis 0 and leaves other slices "
            "unchanged, as in a queue or a memory bank. Lockstep averages float buffers over the shards, which would "
            "mix old and new slices. " + way_out
        ) in str(caught.value)
        assert trainer.digest() == before


def test_with_one_shard_a_queue_is_as_in_the_plain_loop():
    model, plain = Queued(), Queued()
    with wrapped(model, shards=1) as trainer:
        for _ in range(3):
            trainer.step((X, Y))
            plain.enqueue(X)
        assert np.array_equal(trainer.model.queue[...], plain.queue[...])


def test_a_queue_that_the_script_fills_gives_one_digest_on_1_and_2_devices():
    found = set()
    for devices in (1, 2):
        with wrapped(Filled(), devices=devices) as trainer:
            assert len(trainer.devices) == devices
            for _ in range(3):
                trainer.step((X, Y))
                trainer.model.enqueue(X)
            found.add(trainer.digest())
    assert len(found) == 1


class Running(nnx.Module):
    """Statistics of every kind that is averaged."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.codes = nnx.BatchStat(jnp.zeros((6, 8)))  # those that no example is near stay 0
        self.teacher = nnx.BatchStat(jnp.ones((8, 3)))
        self.table = nnx.BatchStat(jnp.ones((8, 3)))  # changes nowhere

    def __call__(self, x):
        x = self.norm(self.first(x) * jnp.asarray([1.0, 0.0] * 4, jnp.float32))
        near = jax.nn.one_hot((x[:, 0] > 0).astype(int), 6, dtype=jnp.float32)
        self.codes[...] = 0.9 * self.codes[...] + 0.1 * near.T @ x
        self.teacher[...] = self.teacher[...].at[:4].multiply(0.99)  # the other rows are frozen
        self.table[...] = self.table[...] * 1
        return self.last(x)


def test_running_statistics_are_averaged():
    trainer = wrapped(Running())
    for _ in range(5):
        trainer.step((X, Y))
