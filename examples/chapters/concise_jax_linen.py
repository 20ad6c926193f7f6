"""Several devices in one line, in JAX, with flax.linen and optax: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_jax_linen.py                  one CPU without Lockstep, then with it one and two, ten epochs
    python concise_jax_linen.py 10 cuda:0 cuda:1   the same on GPUs; on four or eight as well if they are named

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import functools
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


class Residual(nn.Module):
    """Two 3×3 convolutions, and the way around them."""

    num_channels: int
    use_1x1conv: bool = False
    strides: tuple[int, int] = (1, 1)
    training: bool = True

    def setup(self):
        conv = functools.partial(nn.Conv, self.num_channels, (3, 3), use_bias=False)
        norm = functools.partial(nn.BatchNorm, not self.training, momentum=0.9)
        self.body = nn.Sequential([conv(strides=self.strides), norm(), nn.relu, conv(), norm()])
        if self.use_1x1conv:
            self.around = nn.Conv(self.num_channels, (1, 1), self.strides)

    def __call__(self, x):
        return nn.relu(self.body(x) + (self.around(x) if self.use_1x1conv else x))


class ResNet18(nn.Module):
    num_classes: int = 10
    training: bool = True

    def setup(self):
        def resnet_block(num_channels, num_residuals, first_block=False):
            first = Residual(num_channels, not first_block, (1, 1) if first_block else (2, 2), self.training)
            return [first, *(Residual(num_channels, training=self.training) for _ in range(num_residuals - 1))]

        layers = [nn.Conv(64, (3, 3), use_bias=False), nn.BatchNorm(not self.training, momentum=0.9), nn.relu]
        layers += resnet_block(64, 2, first_block=True)
        layers += resnet_block(128, 2) + resnet_block(256, 2) + resnet_block(512, 2)
        self.net = nn.Sequential([*layers, lambda x: x.mean((1, 2)), nn.Dense(self.num_classes)])

    def __call__(self, x):
        return self.net(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_state(net, sgd):
    variables = jax.jit(net.init)(jax.random.key(0), np.zeros((1, 28, 28, 1), np.float32))
    return TrainState.create(apply_fn=net.apply, tx=sgd, **variables)


def examples(x, y):
    return x[..., None].astype("float32") / 255, y


def train_without_lockstep(batch_size, lr):
    """The baseline: the loop of one device, by hand."""

    @jax.jit
    def step(state, x, y):
        def mean_loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            outputs, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), changed

        gradients, changed = jax.grad(mean_loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, **changed)

    @jax.jit
    def predict(state, x):
        return ResNet18(training=False).apply({"params": state.params, "batch_stats": state.batch_stats}, x)

    x, y, x_test, y_test = (jax.numpy.asarray(part) for part in (*train_data, *test_data))
    state = create_state(ResNet18(num_classes=10), optax.inject_hyperparams(optax.sgd)(learning_rate=lr))
    start = time.perf_counter()
    for epoch in range(int(num_epochs)):
        state.opt_state.hyperparams["learning_rate"] = np.float32(lr * (1 - epoch / int(num_epochs)))
        order = np.random.default_rng(epoch).permutation(len(x))
        for rows in np.split(order, range(batch_size, len(x), batch_size)):
            state = step(state, x[rows], y[rows])
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    parts = [x_test[at : at + batch_size] for at in range(0, len(x_test), batch_size)]
    accuracy = (np.concatenate([predict(state, part) for part in parts]).argmax(1) == y_test).mean()
    print(f"without Lockstep: {accuracy:.2f}, {seconds / int(num_epochs):.1f} sec/epoch, {seconds:.1f} sec in total")


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=lr)
    net = create_state(ResNet18(num_classes=10), sgd)
    loss = optax.softmax_cross_entropy_with_integer_labels
    trainer = lockstep.wrap(net, loss=loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_jax_linen_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    history = trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print(f"number of devices: {len(trainer.devices)}, {sum(history.seconds):.1f} sec in total")
    for device, weight in zip(trainer.devices, trainer.copies("model.params.net.layers_0.kernel"), strict=True):
        print(device, weight.data[:, :, 0, 0])
    print("parallel inference:", trainer(test_data[0][:4]))
    print("parallel evaluation:", trainer.evaluate(test_data))
    print(trainer.digest())
    trainer.close()


train_data, test_data = (examples(*part) for part in fashion_mnist())
kind, index = all_devices[0].split(":")
with jax.default_device(jax.devices(kind)[int(index)]):
    train_without_lockstep(batch_size=256, lr=0.1)
train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
for num_devices in (4, 8):
    if num_devices <= len(all_devices):
        train(num_devices, batch_size=512, lr=0.2)  # the digest of two devices: it depends on the 8 shards
