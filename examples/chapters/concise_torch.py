"""Several devices in one line, in PyTorch: ResNet-18 on Fashion-MNIST, with lockstep.wrap.

    python concise_torch.py                  one CPU without Lockstep, then with it one and two, ten epochs
    python concise_torch.py 10 cuda:0 cuda:1   the same on GPUs; on four or eight as well if they are named

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import sys
import time

import torch
from torch import nn

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")


class Residual(nn.Module):
    """Two 3×3 convolutions, and the way around them."""

    def __init__(self, in_channels, num_channels, use_1x1conv=False, strides=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, num_channels, 3, strides, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
            nn.ReLU(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_channels),
        )
        self.around = nn.Conv2d(in_channels, num_channels, 1, strides) if use_1x1conv else nn.Identity()

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.around(x))


def resnet_block(in_channels, num_channels, num_residuals, first_block=False):
    first = Residual(in_channels, num_channels, use_1x1conv=not first_block, strides=1 if first_block else 2)
    return [first, *(Residual(num_channels, num_channels) for _ in range(num_residuals - 1))]


def resnet18(num_classes, in_channels=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(in_channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    net.extend(resnet_block(64, 64, 2, first_block=True))
    net.extend(resnet_block(64, 128, 2))
    net.extend(resnet_block(128, 256, 2))
    net.extend(resnet_block(256, 512, 2))
    return net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)])


def examples(x, y):
    return x[:, None].astype("float32") / 255, y


def train_without_lockstep(batch_size, lr):
    """The baseline: the loop of one device, by hand."""
    device = all_devices[0]
    net = resnet18(num_classes=10).to(device)
    sgd = torch.optim.SGD(net.parameters(), lr)
    loss = nn.CrossEntropyLoss()
    x, y, x_test, y_test = (torch.from_numpy(part).to(device) for part in (*train_data, *test_data))
    start = time.perf_counter()
    for epoch in range(int(num_epochs)):
        sgd.param_groups[0]["lr"] = lr * (1 - epoch / int(num_epochs))
        for rows in torch.randperm(len(x), device=device).split(batch_size):
            sgd.zero_grad()
            value = loss(net(x[rows]), y[rows])
            value.backward()
            sgd.step()
    value.item()  # waits for a GPU
    seconds = time.perf_counter() - start
    net.eval()
    with torch.no_grad():
        outputs = torch.cat([net(part) for part in x_test.split(batch_size)])
    accuracy = (outputs.argmax(1) == y_test).float().mean().item()
    print(f"without Lockstep: {accuracy:.2f}, {seconds / int(num_epochs):.1f} sec/epoch, {seconds:.1f} sec in total")


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    net = resnet18(num_classes=10)
    sgd = torch.optim.SGD(net.parameters(), lr)
    loss = nn.CrossEntropyLoss()
    trainer = lockstep.wrap(net, sgd, loss, metrics=["accuracy"], devices=devices)
    plot = lockstep.Plot(f"concise_torch_{num_devices}.png")
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
