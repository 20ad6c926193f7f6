"""Variables that are not trained: averaged if every shard changes them, else unchanged."""

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
GENERATOR = np.random.Generator(np.random.PCG64(5))
X = GENERATOR.standard_normal((23, 6)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 23)


class Net(nnx.Module):
    """Two layers; subclasses add what a test needs."""

    def __init__(self):
        self.first = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class Choosy(Net):
    """Changes its mean for large shards only."""

    def __init__(self):
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros(6))

    def __call__(self, x):
        if len(x) > 1:
            self.mean[...] = x.mean(0)
        return super().__call__(x)


@pytest.mark.parametrize("count", [1, 3])
def test_variables_that_only_some_shards_change_are_refused(count):
    trainer = lockstep.wrap(Choosy(), optax.sgd(0.1), LOSS, devices=count, shards=4)
    before = trainer.digest()
    with pytest.raises(ModelError, match=r"variable 'mean' changed in 2 of 4 shards, but a variable must change in"):
        trainer.step((X[:6], Y[:6]))
    assert trainer.digest() == before


class Fractional(Net):
    """Writes floats to an integer variable, or the other way round."""

    def __init__(self, start, step):
        super().__init__()
        self.seen = nnx.Variable(start)
        self.step = step

    def __call__(self, x):
        self.seen.set_value(self.step(self.seen[...]))
        return super().__call__(x)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    ("start", "step", "came", "was"),
    [
        (jnp.zeros((), jnp.int32), lambda seen: seen + jnp.float32(1.5), "float32", "int32"),
        (jnp.zeros((), jnp.float32), lambda seen: seen.astype(jnp.int32), "int32", "float32"),
        (jnp.zeros((), jnp.float32), lambda seen: seen + jnp.complex64(1j), "complex64", "float32"),
    ],
)
def test_a_variable_that_changes_its_kind_of_numbers_is_refused(shards, start, step, came, was):
    trainer = lockstep.wrap(Fractional(start, step), optax.sgd(0.1), LOSS, shards=shards)
    message = f"changed the type of the variable 'seen' from {was} to {came}. Create the variable as {came}"
    with pytest.raises(ModelError, match=message):
        trainer.step((X, Y))


def test_a_variable_may_be_written_in_a_wider_or_shorter_type():
    model = Fractional(jnp.ones((), jnp.bfloat16), lambda seen: seen.astype(jnp.float32) * 2)
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, shards=4)
    trainer.step((X, Y))
    assert model.seen[...] == 2
    assert model.seen[...].dtype == jnp.bfloat16


class Rematerialized(Net):
    """Passes its first layer through a transformation."""

    def __call__(self, x):
        return self.last(nnx.relu(nnx.remat(lambda layer, x: layer(x))(self.first, x)))


def test_untrained_parameters_keep_their_bits():
    model = Rematerialized()
    last = nnx.All(nnx.Param, nnx.PathContains("last"))
    trainer = lockstep.wrap(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=last), LOSS, shards=8)
    before = trainer.digests()
    trainer.step((X, Y))
    changed = {name for name, digest in trainer.digests().items() if digest != before[name]}
    assert changed == {"model.last.kernel", "model.last.bias", "optimizer.steps made"}


class Keyed(Net):
    """Has a random key as a variable."""

    def __init__(self):
        super().__init__()
        self.key = nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        return super().__call__(x + jax.random.normal(self.key[...], x.shape[1:]))


def test_keys_may_be_variables_and_part_of_an_optimizers_state():
    def trained(count):
        tx = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1))
        trainer = lockstep.wrap(Keyed(), tx, LOSS, devices=count, shards=2)
        trainer.step((X, Y))
        state, before = trainer.state(), trainer.digest()
        trainer.load_state(state)
        assert trainer.digest() == before
        trainer.step((X, Y))
        return trainer.digest()

    assert trained(1) == trained(2)


class Counting(Net):
    """Counts its calls in arrays that are plain attributes."""

    def __init__(self):
        super().__init__()
        self.calls = nnx.data(jnp.zeros((), jnp.int32))
        self.more = nnx.data({"calls": [jnp.zeros((), jnp.int32)]})

    def __call__(self, x):
        self.calls = self.calls + 1
        self.more["calls"][0] = self.more["calls"][0] + 1
        return super().__call__(x)


def test_arrays_without_a_variable_are_updated_too():
    model = Counting()
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, devices=2, shards=2)
    trainer.step((X, Y))
    trainer.step((X, Y))
    assert (int(model.calls), int(model.more["calls"][0])) == (2, 2)
    model.last.bias[...] = jnp.zeros(3, jnp.float32)  # takes everything over from the module
    assert trainer.state()["model.calls"].data == 2
    model.calls = jnp.asarray(7, jnp.int32)
    assert trainer.state()["model.calls"].data == 7


@pytest.mark.parametrize("value", [jnp.zeros((1, 3)), jnp.zeros(3, jnp.bfloat16)], ids=["shape", "type"])
def test_an_array_of_another_shape_or_type_is_refused(value):
    model = Net()
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, shards=2)
    model.last.bias.set_value(value)
    with pytest.raises(ModelError, match=r"'last.bias' was changed from \(3,\) of float32 to \(.*3.*\) of"):
        trainer.step((X, Y))
    model.last.bias.set_value(np.zeros(3, np.float32))
    assert not trainer.state()["model.last.bias"].data.any()


class Empty(Net):
    """Has variables that hold no array."""

    def __init__(self):
        super().__init__()
        self.bias, self.mean = nnx.Param(None), nnx.BatchStat(None)

    def __call__(self, x):
        return super().__call__(x) if self.bias.get_value() is None else super().__call__(x) + self.bias[...]


def test_a_variable_may_hold_none_and_must_stay_none():
    model = Empty()
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, devices=2, shards=4)
    plain = lockstep.wrap(Net(), optax.sgd(0.1), LOSS, shards=4)
    for each in (trainer, plain):
        each.step((X, Y))
    assert trainer.digests() == plain.digests()
    model.bias.set_value(jnp.zeros(3, jnp.float32))
    with pytest.raises(ModelError, match=r"'bias' was changed from None to \(3,\) of float32"):
        trainer.step((X, Y))


@pytest.mark.parametrize("value", [{"w": jnp.zeros(3)}, (jnp.zeros(3), jnp.zeros(3))], ids=["dict", "tuple"])
def test_a_variable_with_several_arrays_is_refused(value):
    model = Net()
    model.several = nnx.Param(value)
    with pytest.raises(
        ModelError, match=rf"'several' contains a {type(value).__name__}, but a variable must contain one array"
    ):
        lockstep.wrap(model, optax.sgd(0.1), LOSS, shards=4)


def test_objects_added_to_a_module_are_refused_by_name():
    model = Net()
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, shards=2)
    model.seen = nnx.Variable(jnp.zeros(3))
    with pytest.raises(ModelError, match="'seen' was replaced, added or removed"):
        trainer.step((X, Y))
