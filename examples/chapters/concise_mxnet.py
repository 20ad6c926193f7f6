"""Several devices in one line, in MXNet, with gluon: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_mxnet.py                    ten epochs on one CPU, then on two
    python concise_mxnet.py 10 gpu:0 gpu:1   the same on GPUs

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


class Residual(gluon.HybridBlock):
    """Two 3×3 convolutions, and the way around them."""

    def __init__(self, before, channels, stride=1):
        super().__init__()
        self.body = nn.HybridSequential()
        self.body.add(
            nn.Conv2D(channels, 3, stride, padding=1, use_bias=False, in_channels=before),
            nn.BatchNorm(in_channels=channels),
            nn.Activation("relu"),
            nn.Conv2D(channels, 3, padding=1, use_bias=False, in_channels=channels),
            nn.BatchNorm(in_channels=channels),
        )
        self.around = None if before == channels else nn.Conv2D(channels, 1, stride, in_channels=before)

    def hybrid_forward(self, F, x):
        return F.relu(self.body(x) + (x if self.around is None else self.around(x)))


def resnet18(num_classes, in_channels=1):
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(64, 3, padding=1, use_bias=False, in_channels=in_channels),
        nn.BatchNorm(in_channels=64),
        nn.Activation("relu"),
    )
    net.add(Residual(64, 64), Residual(64, 64))
    for channels in (128, 256, 512):
        net.add(Residual(channels // 2, channels, stride=2), Residual(channels, channels))
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(num_classes, in_units=512))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def examples(x, y):
    return x[:, None].astype("float32") / 255, y


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = ("sgd", {"learning_rate": lr})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_mxnet_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print("number of devices:", len(trainer.devices))
    for device, weight in zip(trainer.devices, trainer.copies("model.0.weight"), strict=True):
        print(device, weight.data[0, 0])
    print("parallel evaluation:", trainer.evaluate(test_data))
    print(trainer.digest())
    trainer.close()


train_data, test_data = (examples(*part) for part in fashion_mnist())
train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
