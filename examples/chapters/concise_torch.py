"""Several devices in one line, in PyTorch: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_torch.py                    ten epochs on one CPU, then on two
    python concise_torch.py 10 cuda:0 cuda:1   the same on GPUs

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys

import torch
from torch import nn

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


class Residual(nn.Module):
    """Two 3×3 convolutions, and the way around them."""

    def __init__(self, before, channels, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.around = nn.Identity() if before == channels else nn.Conv2d(before, channels, 1, stride)

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.around(x))


def resnet18(num_classes, in_channels=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(in_channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    net.extend([Residual(64, 64), Residual(64, 64)])
    for channels in (128, 256, 512):
        net.extend([Residual(channels // 2, channels, stride=2), Residual(channels, channels)])
    return net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)])


def examples(x, y):
    return x[:, None].astype("float32") / 255, y


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = torch.optim.SGD(net.parameters(), lr)
    loss = nn.CrossEntropyLoss()
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_torch_{num_devices}.png")
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
