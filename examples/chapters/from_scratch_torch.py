"""Several devices from scratch, in PyTorch: LeNet on Fashion-MNIST, out of replicate, split and allreduce.

    python from_scratch_torch.py                    ten epochs on one CPU, then on two (4, 8 if named)
    python from_scratch_torch.py 10 cuda:0 cuda:1   the same on GPUs

Needs Fashion-MNIST: `apt-get install dataset-fashion-mnist`.
"""

import hashlib
import sys
import time

import numpy
import torch
from torch.nn import functional as F

import lockstep
from lockstep.datasets import fashion_mnist

num_epochs, *all_devices = sys.argv[1:] or ("10", "cpu:0", "cpu:1")
mean, deviation = 0.286, 0.353  # of the training images, as numbers from 0 to 1


def initial():
    """The parameters of LeNet: two convolutions and two dense layers, each with a bias."""
    generator = numpy.random.default_rng(0)
    shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    values = [generator.normal(0, 0.01, shape) if len(shape) > 1 else numpy.zeros(shape) for shape in shapes]
    return [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in values]


def lenet(x, params):
    conv1, bias1, conv2, bias2, dense3, bias3, dense4, bias4 = params
    x = F.avg_pool2d(F.relu(F.conv2d(x, conv1, bias1)), 2)
    x = F.avg_pool2d(F.relu(F.conv2d(x, conv2, bias2)), 2)
    x = F.relu(x.flatten(1) @ dense3 + bias3)
    return x @ dense4 + bias4


def gradient(params, x, y):
    loss = F.cross_entropy(lenet(x, params), y, reduction="sum")
    return torch.autograd.grad(loss, params)


@torch.no_grad()
def update(params, gradients, lr):
    for param, grad in zip(params, gradients, strict=True):
        param -= lr * grad
    return params


@torch.no_grad()
def accuracy(params, x, y):
    return (lenet(x, params).argmax(1) == y).float().mean()


def examples(x, y):
    return torch.tensor((x[:, None] / 255 - mean) / deviation, dtype=torch.float32), torch.tensor(y)


def host(params):
    return [param.detach().cpu().numpy() for param in params]


def train_batch(batch, replicas, devices, lr):
    pieces = lockstep.split(batch, devices, shards=8)
    gradients = [[gradient(params, *shard) for shard in piece] for params, piece in zip(replicas, pieces, strict=True)]
    gradients = lockstep.allreduce(gradients, shards=8)
    lr = lr / sum(pieces.sizes)  # the loss is a sum over examples, so that the shards' gradients can simply be added
    return [update(params, grads, lr) for params, grads in zip(replicas, gradients, strict=True)]


def train(num_devices, batch_size, lr):
    devices = all_devices[:num_devices]
    replicas = lockstep.replicate(initial(), devices)
    history = lockstep.History(devices)
    for epoch in range(int(num_epochs)):
        start = time.perf_counter()
        for x, y in lockstep.data.arrays(*train_data).shuffle(seed=epoch).batch(batch_size):
            replicas = train_batch(examples(x, y), replicas, devices, lr * (1 - epoch / int(num_epochs)))
        on_host = [host(params) for params in replicas]  # waits until they are there
        seconds = time.perf_counter() - start
        (test,) = lockstep.split(examples(*test_data), devices[:1])
        history.record(epoch, {"val_accuracy": accuracy(replicas[0], *test)}, seconds)
        history.plot(f"from_scratch_torch_{num_devices}.png")  # after every epoch
    print(history.summarize())
    for device, params in zip(devices, on_host, strict=True):
        print(device, hashlib.sha256(b"".join(param.tobytes() for param in params)).hexdigest())


train_data, test_data = fashion_mnist()
for num_devices in (1, 2, 4, 8):
    if num_devices <= len(all_devices):
        train(num_devices, batch_size=256, lr=0.2)  # the digest is the same: it depends on the 8 shards
