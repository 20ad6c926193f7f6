"""Several devices in one line, in JAX, with flax and optax: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_jax.py                  one CPU without Lockstep, then with it one and two, ten epochs
    python concise_jax.py 10 cuda:0 cuda:1   the same on GPUs; on four or eight as well if they are named

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


class Residual(nnx.Module):
    """Two 3×3 convolutions, and the way around them."""

    def __init__(self, in_channels, num_channels, use_1x1conv=False, strides=1, *, rngs):
        self.body = nnx.Sequential(
            nnx.Conv(in_channels, num_channels, (3, 3), strides, use_bias=False, rngs=rngs),
            nnx.BatchNorm(num_channels, momentum=0.9, rngs=rngs),
            nnx.relu,
            nnx.Conv(num_channels, num_channels, (3, 3), use_bias=False, rngs=rngs),
            nnx.BatchNorm(num_channels, momentum=0.9, rngs=rngs),
        )
        self.around = nnx.Conv(in_channels, num_channels, (1, 1), strides, rngs=rngs) if use_1x1conv else None

    def __call__(self, x):
        return nnx.relu(self.body(x) + (x if self.around is None else self.around(x)))


def resnet_block(in_channels, num_channels, num_residuals, first_block=False, *, rngs):
    strides = 1 if first_block else 2
    first = Residual(in_channels, num_channels, use_1x1conv=not first_block, strides=strides, rngs=rngs)
    return [first, *(Residual(num_channels, num_channels, rngs=rngs) for _ in range(num_residuals - 1))]


def resnet18(num_classes, in_channels=1):
    rngs = nnx.Rngs(0)
    layers = [nnx.Conv(in_channels, 64, (3, 3), use_bias=False, rngs=rngs)]
    layers += [nnx.BatchNorm(64, momentum=0.9, rngs=rngs), nnx.relu]
    layers += resnet_block(64, 64, 2, first_block=True, rngs=rngs)
    layers += resnet_block(64, 128, 2, rngs=rngs)
    layers += resnet_block(128, 256, 2, rngs=rngs)
    layers += resnet_block(256, 512, 2, rngs=rngs)
    return nnx.Sequential(*layers, lambda x: x.mean((1, 2)), nnx.Linear(512, num_classes, rngs=rngs))


def examples(x, y):
    return x[..., None].astype("float32") / 255, y


def train_without_lockstep(batch_size, lr):
    """The baseline: the loop of one device, by hand."""

    @nnx.jit
    def step(net, sgd, x, y):
        def mean_loss(net):
            return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()

        sgd.update(net, nnx.grad(mean_loss)(net))

    net = resnet18(num_classes=10)
    falling = optax.inject_hyperparams(optax.sgd)(learning_rate=lr)
    sgd = nnx.Optimizer(net, falling, wrt=nnx.Param)
    x, y, x_test, y_test = (jax.numpy.asarray(part) for part in (*train_data, *test_data))
    start = time.perf_counter()
    for epoch in range(int(num_epochs)):
        sgd.opt_state.hyperparams["learning_rate"][...] = lr * (1 - epoch / int(num_epochs))
        order = np.random.default_rng(epoch).permutation(len(x))
        for rows in np.split(order, range(batch_size, len(x), batch_size)):
            step(net, sgd, x[rows], y[rows])
    jax.block_until_ready(nnx.state(net))
    seconds = time.perf_counter() - start
    net.eval()
    parts = [x_test[at : at + batch_size] for at in range(0, len(x_test), batch_size)]
    accuracy = (np.concatenate([nnx.jit(net)(part) for part in parts]).argmax(1) == y_test).mean()
    print(f"without Lockstep: {accuracy:.2f}, {seconds / int(num_epochs):.1f} sec/epoch, {seconds:.1f} sec in total")


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=lr)
    loss = optax.softmax_cross_entropy_with_integer_labels
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_jax_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    history = trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print(f"number of devices: {len(trainer.devices)}, {sum(history.seconds):.1f} sec in total")
    for device, weight in zip(trainer.devices, trainer.copies("model.layers.0.kernel"), strict=True):
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
