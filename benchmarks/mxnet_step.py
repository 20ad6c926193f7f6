"""A LeNet step on two contexts against gluon.Trainer(kvstore="device"), in one process and one interleaved run.

In a round each peer makes one block of steps, in turn; the order is turned around
from round to round. Ratios are medians of the rounds' own ratios, so that what else
the machine does falls on everyone alike.

    .venv-mxnet/bin/python benchmarks/mxnet_step.py [--rounds 15] [--dropout 0.5]
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np

import lockstep

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, NUM_BATCHES = 256, 8
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
SGD = {"learning_rate": 0.01, "momentum": 0.9}


def lenet(dropout: float) -> nn.HybridBlock:
    """Caffe's LeNet, 431,080 parameters."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, 5, activation="relu"), nn.MaxPool2D(2, 2), nn.Conv2D(50, 5, activation="relu"))
    net.add(nn.MaxPool2D(2, 2), nn.Flatten(), nn.Dense(500, activation="relu"))
    if dropout:
        net.add(nn.Dropout(dropout))
    net.add(nn.Dense(10))
    net.hybridize()
    return net


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.Generator(np.random.PCG64(0))
    return [
        (generator.standard_normal((BATCH, 1, 28, 28)).astype("float32"), generator.integers(0, 10, BATCH))
        for _ in range(NUM_BATCHES)
    ]


def plain(dropout: float, reads: bool) -> Callable[[np.ndarray, np.ndarray], None]:
    """The loop that gluon's own tutorials write; with `reads` it reads the loss, as `fit` does."""
    net = lenet(dropout)
    net.initialize(mx.init.Xavier(), ctx=CONTEXTS)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore="device")

    def step(x: np.ndarray, y: np.ndarray) -> None:
        xs = gluon.utils.split_and_load(x, CONTEXTS)
        ys = gluon.utils.split_and_load(y, CONTEXTS)
        with autograd.record():
            found = [loss(net(each), labels) for each, labels in zip(xs, ys, strict=True)]
        for each in found:
            each.backward()
        trainer.step(BATCH)
        if reads:
            sum(each.sum().asscalar() for each in found)

    return step


def exact(dropout: float, shards: int, devices: int = 2) -> Callable[[np.ndarray, np.ndarray], None]:
    """The same in Lockstep."""
    net = lenet(dropout)
    net.initialize(mx.init.Xavier())
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = lockstep.wrap(net, ("sgd", SGD), loss, devices=devices, shards=shards)
    return lambda x, y: trainer.step((x, y))["loss"]


def measure(peers: dict[str, Callable[..., None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step, of every peer in every round."""
    data = batches()
    result: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(-1, rounds):  # the first round warms up
        for name in list(peers) if number % 2 else reversed(peers):
            mx.nd.waitall()
            started = time.perf_counter()
            for index in range(steps):
                peers[name](*data[index % NUM_BATCHES])
            mx.nd.waitall()
            if number >= 0:
                result[name].append(1000 * (time.perf_counter() - started) / steps)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    asked = parser.parse_args()
    peers = {
        "gluon.Trainer": plain(asked.dropout, reads=False),
        "gluon.Trainer, loss read": plain(asked.dropout, reads=True),
        "lockstep, 2 shards": exact(asked.dropout, 2),
        "lockstep, 8 shards": exact(asked.dropout, 8),
    }
    found = measure(peers, asked.rounds, asked.steps)
    base = found["gluon.Trainer"]
    print(f"mxnet {mx.__version__}, numpy {np.__version__}, LeNet, batch {BATCH}, 2 contexts, dropout {asked.dropout}")
    for name, values in found.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:26} {statistics.median(values):7.1f} ms a step   "
            f"{statistics.median(ratios):.3f}x ({low:.3f} – {high:.3f})"
        )


if __name__ == "__main__":
    main()
