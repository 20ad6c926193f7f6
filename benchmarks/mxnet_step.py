"""Compare gluon's own loop and Lockstep: `.venv-mxnet/bin/python benchmarks/mxnet_step.py`, less than four minutes.

The loop is that of gluon's tutorials, over one context, or over two with `gluon.Trainer(kvstore="device")`. It sums up
loss and accuracy on the contexts. All rows let MXNet run ahead by one step.
"""

import sys
import warnings
from functools import partial

from compare import Entry, Framework, lockstep_entries, main
from peers import Way, serve
from timing import time_steps
from ways import images, lockstep_ways, serve_arguments, shuffled_batches

SHAPE = 1, 28, 28
TITLES = {"mlp": "MLP 784-256-256-10", "lenet": "LeNet 20-50-500-10"}
BATCH_SIZES = {"mlp": 256, "lenet": 256}
SGD = "sgd", {"learning_rate": 0.01, "momentum": 0.9}


def entries(name: str) -> list[Entry]:
    """Return the contenders for one model."""
    return [
        Entry("plain gluon loop, 1 context", "plain", [["--serve", "gluon", name, "--devices", "1"]]),
        Entry("gluon.Trainer, 2 contexts", "own", [["--serve", "gluon", name, "--devices", "2"]]),
        *lockstep_entries(name, BATCH_SIZES[name]),
    ]


def model(name, contexts):
    """Return the net, hybridized and initialized, and its loss."""
    import mxnet as mx
    from mxnet import gluon
    from mxnet.gluon import nn

    mx.random.seed(0)
    net = nn.HybridSequential()
    if name == "mlp":
        net.add(nn.Flatten(), nn.Dense(256, activation="relu"), nn.Dense(256, activation="relu"))
    else:
        net.add(nn.Conv2D(20, 5, activation="relu"), nn.MaxPool2D(2, 2), nn.Conv2D(50, 5, activation="relu"))
        net.add(nn.MaxPool2D(2, 2), nn.Flatten(), nn.Dense(500, activation="relu"))
    net.add(nn.Dense(10))
    net.hybridize()
    net.initialize(mx.init.Xavier(), ctx=contexts)
    return net, gluon.loss.SoftmaxCrossEntropyLoss()


def gluon_loop(name: str, num_contexts: int) -> dict[str, Way]:
    """Return the loop that gluon's tutorials write."""
    import mxnet as mx
    from mxnet import autograd, gluon

    contexts = [mx.cpu(index) for index in range(num_contexts)]
    net, criterion = model(name, contexts)
    batch_size = BATCH_SIZES[name]
    trainer = gluon.Trainer(net.collect_params(), *SGD, kvstore="device")
    source = shuffled_batches(images(SHAPE), batch_size)
    sums = [mx.nd.zeros(2, ctx=context) for context in contexts]  # of losses and hits
    before = []

    def step() -> None:
        x, y = next(source)
        xs, ys = gluon.utils.split_and_load(x, contexts), gluon.utils.split_and_load(y, contexts)
        with autograd.record():
            outputs = [net(part) for part in xs]
            losses = [criterion(output, labels) for output, labels in zip(outputs, ys, strict=True)]
        autograd.backward(losses)
        trainer.step(batch_size)
        for index, (output, labels, loss) in enumerate(zip(outputs, ys, losses, strict=True)):
            hits = (output.argmax(axis=1) == labels.astype("float32")).sum()
            sums[index] += mx.nd.concat(loss.sum(), hits, dim=0)
        for loss in before:
            loss.wait_to_read()
        before[:] = losses

    def finish() -> None:
        for each in sums:
            each.asnumpy()
        mx.nd.waitall()

    return {"step": partial(time_steps, step, finish)}


def with_lockstep(name: str, devices: int | None, shards: int | None, expected: list[int]) -> dict[str, Way]:
    """Return the ways to train with Lockstep."""
    import mxnet as mx

    import lockstep

    net, criterion = model(name, [mx.cpu(0)])
    trainer = lockstep.wrap(net, SGD, criterion, metrics=["accuracy"], devices=devices, shards=shards)
    arrays, batch_size = images(SHAPE), BATCH_SIZES[name]
    return lockstep_ways(trainer, arrays, shuffled_batches(arrays, batch_size), batch_size, expected)


def serve_one() -> None:
    """Be a peer."""
    warnings.simplefilter("ignore")  # MXNet uses names that NumPy 1.23 warns of
    asked = serve_arguments()
    if asked.serve == "lockstep":
        serve(with_lockstep(asked.model, asked.devices, asked.shards, asked.expect))
    else:
        serve(gluon_loop(asked.model, asked.devices))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve_one()
    else:
        main(
            Framework(
                name="mxnet",
                title="MXNet: gluon.Trainer and Lockstep",
                script=__file__,
                own_way="gluon.Trainer on 2",
                packages=("mxnet", "numpy"),
                titles=TITLES,
                batch_sizes=BATCH_SIZES,
                entries=entries,
                default_models=("mlp", "lenet"),
                default_rounds=12,
            )
        )
