"""MXNet: forms, each beside the plain gluon it stands for."""

from types import SimpleNamespace

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import lockstep
from backends.kit import (
    CLASS_WEIGHTS,
    CLASSES,
    EXAMPLE_WEIGHTS,
    GAPPED,
    IGNORED,
    LABELS,
    NUM_EXAMPLES,
    VALUES,
    WEIGHTS,
    Form,
    X,
)
from backends.oracle import make_form
from lockstep.backends import mxnet as module

__all__ = [
    "compiles",
    "cross_entropy",
    "forms",
    "model",
    "module",
    "normalized",
    "nudge",
    "set_rate",
    "sgd",
    "short",
    "weights",
]

compiles = False

PADDING = -1
LENGTHS = 1 + np.arange(NUM_EXAMPLES) * 6 // NUM_EXAMPLES  # 1 to 6 tokens, so that shards have unequal counts
TOKENS = np.random.Generator(np.random.PCG64(4)).integers(0, 11, (NUM_EXAMPLES, 6))
TAGS = np.where(np.arange(6) < LENGTHS[:, None], TOKENS % CLASSES, PADDING)


def model(weights, dropout=0.0):
    net = nn.HybridSequential()
    depth = len(weights) // 2
    for index in range(depth):
        inputs, outputs = weights[f"{index}.weight"].shape
        if index == depth - 1:
            net.add(nn.Dropout(dropout))
        activation = "relu" if index < depth - 1 else None
        net.add(nn.Dense(outputs, in_units=inputs, activation=activation, dtype="float64"))
    net.initialize()
    for index, layer in enumerate(layer for layer in net if isinstance(layer, nn.Dense)):
        layer.weight.set_data(nd.array(weights[f"{index}.weight"].T, dtype="float64"))
        layer.bias.set_data(nd.array(weights[f"{index}.bias"], dtype="float64"))
    return net


def sgd(model, lr, momentum=0.0):
    return mx.optimizer.SGD(learning_rate=lr, momentum=momentum)


def cross_entropy():
    return module.CrossEntropy(ignore_index=IGNORED)


def weights(model):
    return {name: each.data().asnumpy() for name, each in model._collect_params_with_prefix().items()}


def nudge(model):
    next(iter(model.collect_params().values())).data()[0, 0] += 1


def short(out, y):
    """The first output, as a loss in a type too short for most shares."""
    return out[0, 0].astype("float16")


def set_rate(optimizer, lr):
    optimizer.set_learning_rate(lr)


class normalized:
    """Batch norm alone: a model, what a plain pass over some examples leaves in it, and how to read that."""

    counters = ()
    loss = gluon.loss.L2Loss()

    @staticmethod
    def model():
        net = nn.BatchNorm(in_channels=X.shape[1])
        net.initialize()
        for each in net.collect_params().values():  # gluon casts a batch norm to float32 at most
            each.cast("float64")
        return net

    @staticmethod
    def run(model, x):
        with autograd.record():
            out = model(nd.array(x, dtype="float64"))
        out.backward()

    @staticmethod
    def read(model):
        return {name: getattr(model, name).data().asnumpy() for name in ("running_mean", "running_var")}


class Cat(gluon.HybridBlock):
    """Inputs by position or by name."""

    def __init__(self):
        super().__init__()
        self.inner = model(WEIGHTS)

    def hybrid_forward(self, F, left, right):
        return self.inner(F.concat(left, right, dim=1))


class Tagger(gluon.HybridBlock):
    """(examples, tokens) in, (examples, tokens, classes) out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7, dtype="float64")
        self.head = nn.Dense(CLASSES, flatten=False, in_units=7, dtype="float64")
        self.initialize()
        generator = np.random.Generator(np.random.PCG64(5))
        for each in self.collect_params().values():
            each.set_data(nd.array(generator.standard_normal(each.shape), dtype="float64"))

    def hybrid_forward(self, F, tokens):
        return self.head(self.embedding(tokens))


class Complete(gluon.Block):
    """A model that brings its own loss."""

    def __init__(self, kind=SimpleNamespace):
        super().__init__()
        self.inner = model(WEIGHTS)
        self.kind = kind

    def forward(self, x, labels):
        logits = self.inner(x)
        return self.kind(loss=entropies(logits, labels).mean(), logits=logits)


def mlp():
    return model(WEIGHTS)


def hybrid():
    net = mlp()
    net.hybridize()
    return net


def narrow():
    return model({**WEIGHTS, "1.weight": WEIGHTS["1.weight"][:, :1], "1.bias": WEIGHTS["1.bias"][:1]})


def put(batch):
    if isinstance(batch, dict):
        return {key: put(value) for key, value in batch.items()}
    return tuple(map(put, batch)) if isinstance(batch, tuple) else nd.array(batch, dtype=batch.dtype)


def lines(loss, measured=lambda net, *batch: {}):
    """By hand: one pass over the whole batch, forward and backward."""

    def by_hand(net, batch):
        parts = put(batch)
        parts = parts if isinstance(parts, tuple) else (parts,)
        with autograd.record():
            value = loss(net, *parts)
        value.backward()
        gradients = {name: each.grad().asnumpy() for name, each in net._collect_params_with_prefix().items()}
        values = {key: float(np.mean(each.asnumpy())) for key, each in measured(net, *parts).items()}
        return value.asscalar(), gradients, values

    return by_hand


def form(name, batch, loss, by_hand, model=mlp, metrics=(), measured=lambda net, *batch: {}):
    return Form(name, batch, loss, lines(by_hand, measured), model, metrics)


def same(name, loss, model=mlp, metrics=(), like=None):
    """A form whose results numpy knows."""
    return make_form(weights, name, loss, model, metrics, like)


def entropies(out, y):
    """The cross-entropy of every target."""
    return -nd.pick(nd.log_softmax(out), y)


def entropy(net, x, y):
    return entropies(net(x), y).mean()


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def counted(y, ignored=IGNORED):
    return (y != ignored).astype("float64")


def squares(net, x, y):
    return ((net(x) - y) ** 2).mean()


def per_example(out, y):
    return ((out - y) ** 4).mean(axis=1)


def summed(out, y):
    there = counted(y)
    return (entropies(out, y) * there).sum(), there.sum()


@lockstep.objective
def mean_objective(net, batch):
    return entropy(net, batch["x"], batch["y"])


@lockstep.objective
def measuring_objective(net, batch):
    out = net(batch["x"])
    hits = hit(out, batch["y"])
    low = (batch["y"] < 4).astype("float64")
    values = {"mean": hits.mean(), "each": hits, "low": ((hits * low).sum(), low.sum())}
    return entropies(out, batch["y"]).mean(), values


@lockstep.objective
def turning_objective(net, batch):
    """Its values come in another order in every other shard."""
    loss, values = measuring_objective(net, batch)
    return loss, values if int(batch["y"][0].asscalar()) % 2 else dict(reversed(values.items()))


@lockstep.objective
def pair_objective(net, batch):
    return summed(net(batch["x"]), batch["y"])


@lockstep.objective
def spreading_pair_objective(net, batch):
    """A tenth of every loss counts, also in a shard whose weight is 0."""
    there = counted(batch["y"])
    return (entropies(net(batch["x"]), batch["y"]) * (there + 0.1)).sum(), there.sum()


@lockstep.objective
def measuring_pair_objective(net, batch):
    return pair_objective(net, batch), {"size": batch["x"].abs().mean(axis=1)}


@lockstep.objective
def objective_of_examples(net, batch):
    return entropies(net(batch["x"]), batch["y"])


def hit(out, y):
    return (out.argmax(axis=1).astype("float64") == y.astype("float64")).astype("float64")


def hits_of_low(out, y):
    low = (y < 4).astype("float64")
    return (hit(out, y) * low).sum(), low.sum()


def squared(out, y):
    return ((out - y) ** 2).sum(), out.size


def confusion(out, y):
    places = y.astype("float64") * CLASSES + out.argmax(axis=1).astype("float64")
    return nd.one_hot(places, CLASSES**2, dtype="float64").sum(axis=0)


def trace(sums):
    return sums.reshape(CLASSES, CLASSES).trace() / sums.sum()


METRICS_OF_CLASSES = {
    "accuracy": "accuracy",
    "top5": "top5",
    "hit": hit,
    "low": hits_of_low,
    "trace": lockstep.Metric(confusion, trace),
}
METRICS_OF_VALUES = {
    "mse": "mse",
    "mae": "mae",
    "rmse": lockstep.Metric(squared, lambda sums: (sums[0] / sums[1]) ** 0.5),
}


def gluon_loss(kind, **options):
    return lambda net, x, y: kind(**options)(net(x), y).mean()


SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss


def squared_sum(out, y):
    return ((out - y) ** 2).sum()


def summed_pair(out, y):
    return lockstep.Sum((entropies(out, y) * counted(y)).sum(), counted(y).sum())


def total_by_hand(net, x, y):
    return entropies(net(x), y).sum()


@lockstep.objective
def sum_objective(net, batch):
    return summed_pair(net(batch["x"]), batch["y"])


@lockstep.objective
def whole_sum(net, batch):
    return lockstep.Sum(total_by_hand(net, **batch))


forms = [
    # Means over examples.
    same("cross entropy", SOFTMAX()),
    same("cross entropy by name", "cross_entropy", like="cross entropy"),
    same("cross entropy, hybridized", SOFTMAX(), hybrid, like="cross entropy"),
    same("a function", lambda out, y: entropies(out, y).mean(), like="cross entropy"),
    same("probabilities as targets", SOFTMAX(sparse_label=False)),
    form("a weight for all", (X, LABELS), SOFTMAX(weight=0.3), lambda net, x, y: 0.3 * entropy(net, x, y)),
    form("several targets in an example", (TOKENS, abs(TAGS)), SOFTMAX(), entropy, Tagger),
    # Means over the targets that count.
    same("ignored targets", cross_entropy()),
    same("ignored targets, (sum, weight)", summed, like="ignored targets"),
    same("class weights", module.CrossEntropy(weights=CLASS_WEIGHTS)),
    same("class weights and ignored targets", module.CrossEntropy(IGNORED, CLASS_WEIGHTS)),
    form(
        "padded sequences",
        (TOKENS, TAGS),
        module.CrossEntropy(ignore_index=PADDING),
        lambda net, x, y: mean(entropies(net(x), y), counted(y, PADDING)),
        Tagger,
    ),
    # Example weights.
    same("example weights", SOFTMAX()),
    same("example and class weights", module.CrossEntropy(weights=CLASS_WEIGHTS)),
    same("example weights and ignored targets", cross_entropy()),
    form(
        "padded sequences, example weights",
        (TOKENS, TAGS, EXAMPLE_WEIGHTS),
        module.CrossEntropy(ignore_index=PADDING),
        lambda net, x, y, w: mean(entropies(net(x), y), w.expand_dims(1) * counted(y, PADDING)),
        Tagger,
    ),
    same("squares with example weights", "mse"),
    same("squares with example weights in a column", "mse"),
    same("one value per example, with weights", per_example),
    # One value per example.
    same("one value per example", per_example),
    same("several values per example", lambda out, y: (out - y) ** 2, like="squares"),
    # Means over elements.
    same("squares", "mse"),
    form("half squares", (X, VALUES), gluon.loss.L2Loss(), lambda net, x, y: squares(net, x, y) / 2),
    form("huber", (X, VALUES), gluon.loss.HuberLoss(), gluon_loss(gluon.loss.HuberLoss)),
    same("binary targets", gluon.loss.SigmoidBCELoss()),
    # Objectives.
    same("objective", mean_objective),
    same("objective with values", measuring_objective),
    same("objective with values in any order", turning_objective, like="objective with values"),
    same("objective of (sum, weight)", pair_objective),
    same("objective of (sum, weight), a shard's weight 0 and its sum not", spreading_pair_objective),
    form(
        "objective of (sum, weight) with values",
        {"x": X, "y": GAPPED},
        measuring_pair_objective,
        lambda net, batch: mean(entropies(net(batch["x"]), batch["y"]), counted(batch["y"])),
        measured=lambda net, batch: {"size": batch["x"].abs()},
    ),
    same("objective of examples", objective_of_examples, like="objective"),
    same("objective of a Sum", sum_objective, like="objective of (sum, weight)"),
    same("objective of a Sum without a count", whole_sum),
    # Functions that are sums.
    same("a function that is a sum", squared_sum, like="sum of squares"),
    same("a function that gives a Sum", summed_pair),
    # The model's own loss.
    same("an output with a loss", None, Complete, ["accuracy"], like="an output with a loss and logits"),
    same("a dict with a loss", None, lambda: Complete(dict), like="an output with a loss"),
    same(
        "a dict with a loss alone",
        None,
        lambda: Complete(lambda loss, logits: {"loss": loss}),
        like="an output with a loss",
    ),
    # Inputs.
    form(
        "inputs by name",
        ({"right": X[:, 2:], "left": X[:, :2]}, LABELS),
        SOFTMAX(),
        lambda net, x, y: entropies(net(x["left"], x["right"]), y).mean(),
        Cat,
    ),
    same("inputs by position", SOFTMAX(), Cat),
    # Metrics.
    same("metrics of classes", SOFTMAX(), metrics=METRICS_OF_CLASSES),
    same("metrics of values", "mse", metrics=METRICS_OF_VALUES),
    same("metrics without ignored targets", cross_entropy(), metrics=["accuracy", "top5"]),
    same("metrics of probabilities", SOFTMAX(sparse_label=False), metrics=["accuracy", "top5"]),
    same("accuracy of binary targets", gluon.loss.SigmoidBCELoss(), narrow, ["accuracy"]),
    same("accuracy of many binary targets", gluon.loss.SigmoidBCELoss(), metrics=["accuracy"]),
    same("accuracy of a column and a vector of binary targets", gluon.loss.SigmoidBCELoss(), narrow, ["accuracy"]),
    form(
        "a metric in a list",
        (X[:16], LABELS[:16]),  # two examples in a shard: a list of two is no (sum, weight)
        SOFTMAX(),
        entropy,
        metrics={"listed": lambda out, y: hit(out, y).asnumpy().tolist()},
        measured=lambda net, x, y: {"listed": hit(net(x), y)},
    ),
]
