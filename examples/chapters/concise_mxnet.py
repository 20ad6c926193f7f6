"""Several devices in one line, in MXNet, with gluon: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_mxnet.py                  one CPU without Lockstep, then with it one and two, ten epochs
    python concise_mxnet.py 10 gpu:0 gpu:1   the same on GPUs; on four or eight as well if they are named

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys
import time

import mxnet as mx
from mxnet import autograd, gluon, init, np, npx
from mxnet.gluon import nn

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")
npx.set_np()


class Residual(nn.Block):
    """Two 3×3 convolutions, and the way around them."""

    def __init__(self, num_channels, use_1x1conv=False, strides=1):
        super().__init__()
        self.body = nn.Sequential()
        self.body.add(
            nn.Conv2D(num_channels, 3, strides, padding=1, use_bias=False),
            nn.BatchNorm(),
            nn.Activation("relu"),
            nn.Conv2D(num_channels, 3, padding=1, use_bias=False),
            nn.BatchNorm(),
        )
        self.around = nn.Conv2D(num_channels, 1, strides) if use_1x1conv else None

    def forward(self, x):
        return npx.relu(self.body(x) + (x if self.around is None else self.around(x)))


def resnet_block(num_channels, num_residuals, first_block=False):
    block = nn.Sequential()
    block.add(Residual(num_channels, use_1x1conv=not first_block, strides=1 if first_block else 2))
    block.add(*(Residual(num_channels) for _ in range(num_residuals - 1)))
    return block


def resnet18(num_classes):
    mx.random.seed(0)
    net = nn.Sequential()
    net.add(nn.Conv2D(64, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    net.add(resnet_block(64, 2, first_block=True))
    net.add(resnet_block(128, 2), resnet_block(256, 2), resnet_block(512, 2))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    net.initialize(init.Normal(sigma=0.01))  # the first batch decides the shapes
    return net


def examples(x, y):
    return x[:, None].astype("float32") / 255, y


def train_without_lockstep(batch_size, lr):
    """The baseline: gluon's own loop, on one device."""
    kind, index = all_devices[0].split(":")
    device = mx.Context(kind, int(index))
    net = resnet18(num_classes=10)
    net.collect_params().reset_ctx(device)
    sgd = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(*train_data), batch_size, shuffle=True)
    start = time.perf_counter()
    for epoch in range(int(num_epochs)):
        sgd.set_learning_rate(lr * (1 - epoch / int(num_epochs)))
        for x, y in data:
            with autograd.record():
                value = loss(net(x.as_in_ctx(device)), y.as_in_ctx(device))
            value.backward()
            sgd.step(len(y))
    npx.waitall()
    seconds = time.perf_counter() - start
    x, y = test_data
    parts = [net(np.array(x[at : at + batch_size], ctx=device)) for at in range(0, len(x), batch_size)]
    accuracy = (np.concatenate(parts).argmax(1).asnumpy() == y).mean()
    print(f"without Lockstep: {accuracy:.2f}, {seconds / int(num_epochs):.1f} sec/epoch, {seconds:.1f} sec in total")


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = ("sgd", {"learning_rate": lr})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_mxnet_{num_devices}.png")
    falling = lockstep.LearningRateSchedule(lambda epoch: lr * (1 - epoch / int(num_epochs)))
    history = trainer.fit(
        train_data,
        epochs=int(num_epochs),
        batch_size=batch_size,
        validation_data=test_data,
        callbacks=[plot, falling],
    )
    print(f"number of devices: {len(trainer.devices)}, {sum(history.seconds):.1f} sec in total")
    for device, weight in zip(trainer.devices, trainer.copies("model.0.weight"), strict=True):
        print(device, weight.data[0, 0])
    print("parallel inference:", trainer(test_data[0][:4]))
    print("parallel evaluation:", trainer.evaluate(test_data))
    print(trainer.digest())
    trainer.close()


train_data, test_data = (examples(*part) for part in fashion_mnist())
train_without_lockstep(batch_size=256, lr=0.1)
train(num_devices=1, batch_size=256, lr=0.1)
train(num_devices=2, batch_size=512, lr=0.2)
for num_devices in (4, 8):
    if num_devices <= len(all_devices):
        train(num_devices, batch_size=512, lr=0.2)  # the digest of two devices: it depends on the 8 shards
