"""The mode of an nnx module: `step` keeps the script's mode, `fit` sets training mode."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import lockstep
from backends.kits import jax as kit

assert kit.module  # has made the CPU devices
GENERATOR = np.random.Generator(np.random.PCG64(5))
X = GENERATOR.standard_normal((24, 6)).astype(np.float32) + 2
Y = GENERATOR.integers(0, 3, 24)


class Net(nnx.Module):
    def __init__(self, **norm):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs, **norm)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


def wrapped(net, devices=1, shards=4):
    return lockstep.wrap(net, optax.sgd(0.1), "cross_entropy", devices=devices, shards=shards)


def flags(net):
    return net.norm.use_running_average, net.dropout.deterministic


def test_a_step_in_evaluation_mode_is_as_in_the_plain_loop():
    net, plain = Net(), Net()
    trainer = wrapped(net, shards=1)
    plain.train()
    net.eval()
    plain.eval()
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(3):
        trainer.step((X, Y))
        step(plain, optimizer, X, Y)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(each, nnx.Param)) for each in (net, plain)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(net.norm.mean[...], np.zeros(16))
    assert flags(net) == (True, True)


def test_modes_set_between_steps_give_one_digest_on_1_2_and_3_devices():
    found = set()
    for devices in (1, 2, 3):
        net = Net()
        with wrapped(net, devices) as trainer:
            assert len(trainer.devices) == devices
            trainer.step((X, Y))
            before = np.array(net.norm.mean[...])
            net.norm.use_running_average = True
            trainer.step((X, Y))
            np.testing.assert_array_equal(net.norm.mean[...], before)
            net.eval()
            trainer.step((X, Y))
            trainer.evaluate((X, Y))
            net.train()
            trainer.step((X, Y))
            assert (np.asarray(net.norm.mean[...]) != before).all()
            found.add(trainer.digest())
    assert len(found) == 1


def test_fit_enters_training_mode_and_leaves_frozen_parts_in_evaluation_mode():
    net = Net()
    net.eval()
    wrapped(net).fit((X, Y), batch_size=24, verbose=0)
    assert flags(net) == (False, False)
    assert np.asarray(net.norm.mean[...]).any()

    frozen = Net(use_running_average=True)
    wrapped(frozen).fit((X, Y), batch_size=24, verbose=0)
    assert flags(frozen) == (True, False)
    assert not np.asarray(frozen.norm.mean[...]).any()


def test_a_train_flag_without_a_default_is_true():
    net = Net(use_running_average=None)
    wrapped(net).step((X, Y))
    assert np.asarray(net.norm.mean[...]).any()
    assert flags(net) == (None, False)


class Overriding(Net):
    """Overrides `train` to set its factor."""

    def train(self):
        super().train()
        self.factor = 1.0

    def __call__(self, x):
        return super().__call__(x) * self.factor


def test_a_fit_calls_the_models_own_train():
    net = Overriding()
    net.factor = 0.0
    wrapped(net).fit((X, Y), batch_size=24, verbose=0)
    assert net.factor == 1.0


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_saves_the_modes(tmp_path, devices):
    one = wrapped(Net())
    one.step((X, Y))
    one.model.eval()
    one.save(tmp_path / "saved")
    one.step((X, Y))
    two = wrapped(Net(), devices)
    two.restore(tmp_path / "saved")
    assert flags(two.model) == (True, True)
    two.step((X, Y))
    assert two.digest() == one.digest()


def test_a_model_loaded_for_inference_stays_in_evaluation_mode(tmp_path):
    trainer = wrapped(Net())
    trainer.save(tmp_path / "saved")
    trainer.model.eval()
    trainer.restore(tmp_path / "saved")
    assert flags(trainer.model) == (True, True)
