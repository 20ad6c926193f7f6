"""Several devices in one line, in JAX, with flax and optax: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_jax.py                    ten epochs on one CPU, then on two
    python concise_jax.py 10 cuda:0 cuda:1   the same on GPUs

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys

import optax
from flax import nnx

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


class Residual(nnx.Module):
    """Two 3×3 convolutions, and the way around them."""

    def __init__(self, before, channels, stride=1, *, rngs):
        self.body = nnx.Sequential(
            nnx.Conv(before, channels, (3, 3), stride, use_bias=False, rngs=rngs),
            nnx.BatchNorm(channels, momentum=0.9, rngs=rngs),
            nnx.relu,
            nnx.Conv(channels, channels, (3, 3), use_bias=False, rngs=rngs),
            nnx.BatchNorm(channels, momentum=0.9, rngs=rngs),
        )
        self.around = None if before == channels else nnx.Conv(before, channels, (1, 1), stride, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.body(x) + (x if self.around is None else self.around(x)))


def resnet18(num_classes, in_channels=1):
    rngs = nnx.Rngs(0)
    layers = [nnx.Conv(in_channels, 64, (3, 3), use_bias=False, rngs=rngs)]
    layers += [nnx.BatchNorm(64, momentum=0.9, rngs=rngs), nnx.relu]
    layers += [Residual(64, 64, rngs=rngs), Residual(64, 64, rngs=rngs)]
    for channels in (128, 256, 512):
        layers += [Residual(channels // 2, channels, stride=2, rngs=rngs), Residual(channels, channels, rngs=rngs)]
    return nnx.Sequential(*layers, lambda x: x.mean((1, 2)), nnx.Linear(512, num_classes, rngs=rngs))


def examples(x, y):
    return x[..., None].astype("float32") / 255, y


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=lr)
    loss = optax.softmax_cross_entropy_with_integer_labels
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_jax_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print("number of devices:", len(trainer.devices))
    for device, weight in zip(trainer.devices, trainer.copies("model.layers.0.kernel"), strict=True):
        print(device, weight.data[:, :, 0, 0])
    print("parallel evaluation:", trainer.evaluate(test_data))
    print(trainer.digest())
    trainer.close()


train_data, test_data = (examples(*part) for part in fashion_mnist())
train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
