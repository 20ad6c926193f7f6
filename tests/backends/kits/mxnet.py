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

HEAVY = nd.array(CLASS_WEIGHTS, dtype="float64")
ODDS = np.exp(VALUES) / np.exp(VALUES).sum(1, keepdims=True)
FLAGS = (VALUES > 0).astype(float)
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


def hits_by_hand(net, batch):
    hits, low = hit(net(batch["x"]), batch["y"]), (batch["y"] < 4).astype("float64")
    return {"mean": hits, "each": hits, "low": mean(hits, low)}


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


def in_top5(out, y):
    best = out.topk(k=5, axis=1).asnumpy()
    return nd.array([label in row for label, row in zip(y.asnumpy(), best, strict=True)], dtype="float64")


def classes_by_hand(net, x, y):
    out = net(x)
    hits = hit(out, y)
    low = mean(hits, (y < 4).astype("float64"))
    return {"accuracy": hits, "hit": hits, "trace": hits, "low": low, "top5": in_top5(out, y)}


def values_by_hand(net, x, y):
    error = net(x) - y
    return {"mse": error**2, "mae": error.abs(), "rmse": (error**2).mean().sqrt()}


def counted_by_hand(net, x, y):
    out = net(x)
    return {"accuracy": mean(hit(out, y), counted(y)), "top5": mean(in_top5(out, y), counted(y))}


def gluon_loss(kind, **options):
    return lambda net, x, y: kind(**options)(net(x), y).mean()


XY = (X, LABELS)
XYW = (X, LABELS, EXAMPLE_WEIGHTS)
NAMED = {"x": X, "y": LABELS}
NAMED_GAPPED = {"x": X, "y": GAPPED}
SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss


def squared_sum(out, y):
    return ((out - y) ** 2).sum()


def summed_pair(out, y):
    return lockstep.Sum((entropies(out, y) * counted(y)).sum(), counted(y).sum())


def pair_by_hand(net, x, y):
    return mean(entropies(net(x), y), counted(y))


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
    form("cross entropy", XY, SOFTMAX(), entropy),
    form("cross entropy by name", XY, "cross_entropy", entropy),
    form("cross entropy, hybridized", XY, SOFTMAX(), entropy, hybrid),
    form("a function", XY, lambda out, y: entropies(out, y).mean(), entropy),
    form("odds as targets", (X, ODDS), SOFTMAX(sparse_label=False), gluon_loss(SOFTMAX, sparse_label=False)),
    form(
        "a weight for all",
        XY,
        SOFTMAX(weight=0.3),
        lambda net, x, y: 0.3 * entropy(net, x, y),
    ),
    form("several targets in an example", (TOKENS, abs(TAGS)), SOFTMAX(), entropy, Tagger),
    # Means over the targets that count.
    form("ignored targets", (X, GAPPED), cross_entropy(), lambda net, x, y: mean(entropies(net(x), y), counted(y))),
    form(
        "ignored targets, (sum, weight)", (X, GAPPED), summed, lambda net, x, y: mean(entropies(net(x), y), counted(y))
    ),
    form(
        "class weights",
        XY,
        module.CrossEntropy(weights=CLASS_WEIGHTS),
        lambda net, x, y: mean(entropies(net(x), y), HEAVY[y]),
    ),
    form(
        "class weights and ignored targets",
        (X, GAPPED),
        module.CrossEntropy(IGNORED, CLASS_WEIGHTS),
        lambda net, x, y: mean(entropies(net(x), y), HEAVY[y] * counted(y)),
    ),
    form(
        "padded sequences",
        (TOKENS, TAGS),
        module.CrossEntropy(ignore_index=PADDING),
        lambda net, x, y: mean(entropies(net(x), y), counted(y, PADDING)),
        Tagger,
    ),
    # Example weights.
    form("example weights", XYW, SOFTMAX(), lambda net, x, y, w: mean(entropies(net(x), y), w)),
    form(
        "example and class weights",
        XYW,
        module.CrossEntropy(weights=CLASS_WEIGHTS),
        lambda net, x, y, w: mean(entropies(net(x), y), w * HEAVY[y]),
    ),
    form(
        "example weights and ignored targets",
        (X, GAPPED, EXAMPLE_WEIGHTS),
        cross_entropy(),
        lambda net, x, y, w: mean(entropies(net(x), y), w * counted(y)),
    ),
    form(
        "padded sequences, example weights",
        (TOKENS, TAGS, EXAMPLE_WEIGHTS),
        module.CrossEntropy(ignore_index=PADDING),
        lambda net, x, y, w: mean(entropies(net(x), y), w.expand_dims(1) * counted(y, PADDING)),
        Tagger,
    ),
    form(
        "squares with example weights",
        (X, VALUES, EXAMPLE_WEIGHTS),
        "mse",
        lambda net, x, y, w: mean(((net(x) - y) ** 2).mean(axis=1), w),
    ),
    form(
        "squares with example weights in a column",
        (X, VALUES, EXAMPLE_WEIGHTS[:, None]),
        "mse",
        lambda net, x, y, w: mean(((net(x) - y) ** 2).mean(axis=1), w.reshape((-1,))),
    ),
    form(
        "one value per example, with weights",
        (X, VALUES, EXAMPLE_WEIGHTS),
        per_example,
        lambda net, x, y, w: mean(per_example(net(x), y), w),
    ),
    # One value per example.
    form("one value per example", (X, VALUES), per_example, lambda net, x, y: per_example(net(x), y).mean()),
    form("several values per example", (X, VALUES), lambda out, y: (out - y) ** 2, squares),
    # Means over elements.
    form("squares", (X, VALUES), "mse", squares),
    form("half squares", (X, VALUES), gluon.loss.L2Loss(), lambda net, x, y: squares(net, x, y) / 2),
    form("huber", (X, VALUES), gluon.loss.HuberLoss(), gluon_loss(gluon.loss.HuberLoss)),
    form("flags", (X, FLAGS), gluon.loss.SigmoidBCELoss(), gluon_loss(gluon.loss.SigmoidBCELoss)),
    # Objectives.
    form("objective", NAMED, mean_objective, lambda net, batch: entropy(net, **batch)),
    form(
        "objective with values",
        NAMED,
        measuring_objective,
        lambda net, batch: entropy(net, **batch),
        measured=hits_by_hand,
    ),
    form(
        "objective with values in any order",
        NAMED,
        turning_objective,
        lambda net, batch: entropy(net, **batch),
        measured=hits_by_hand,
    ),
    form(
        "objective of (sum, weight)",
        NAMED_GAPPED,
        pair_objective,
        lambda net, batch: mean(entropies(net(batch["x"]), batch["y"]), counted(batch["y"])),
    ),
    form(
        "objective of (sum, weight), a shard's weight 0 and its sum not",
        NAMED_GAPPED,
        spreading_pair_objective,
        lambda net, batch: (
            (entropies(net(batch["x"]), batch["y"]) * (counted(batch["y"]) + 0.1)).sum() / counted(batch["y"]).sum()
        ),
    ),
    form(
        "objective of (sum, weight) with values",
        NAMED_GAPPED,
        measuring_pair_objective,
        lambda net, batch: mean(entropies(net(batch["x"]), batch["y"]), counted(batch["y"])),
        measured=lambda net, batch: {"size": batch["x"].abs()},
    ),
    form("objective of examples", NAMED, objective_of_examples, lambda net, batch: entropy(net, **batch)),
    form("objective of a Sum", NAMED_GAPPED, sum_objective, lambda net, batch: pair_by_hand(net, **batch)),
    form("objective of a Sum without a count", NAMED, whole_sum, lambda net, batch: total_by_hand(net, **batch)),
    # Functions that are sums.
    form("a function that is a sum", (X, VALUES), squared_sum, lambda net, x, y: squared_sum(net(x), y)),
    form("a function that gives a Sum", (X, GAPPED), summed_pair, lambda net, x, y: pair_by_hand(net, x, y)),
    # The model's own loss.
    form(
        "an output with a loss",
        {"x": X, "labels": LABELS},
        None,
        lambda net, batch: entropy(net.inner, batch["x"], batch["labels"]),
        Complete,
        ["accuracy"],
        lambda net, batch: {"accuracy": hit(net.inner(batch["x"]), batch["labels"])},
    ),
    form(
        "a dict with a loss",
        {"x": X, "labels": LABELS},
        None,
        lambda net, batch: entropy(net.inner, batch["x"], batch["labels"]),
        lambda: Complete(dict),
    ),
    form(
        "a dict with a loss alone",
        {"x": X, "labels": LABELS},
        None,
        lambda net, batch: entropy(net.inner, batch["x"], batch["labels"]),
        lambda: Complete(lambda loss, logits: {"loss": loss}),
    ),
    # Inputs.
    form(
        "inputs by name",
        ({"right": X[:, 2:], "left": X[:, :2]}, LABELS),
        SOFTMAX(),
        lambda net, x, y: entropies(net(x["left"], x["right"]), y).mean(),
        Cat,
    ),
    form(
        "inputs by position",
        ((X[:, :2], X[:, 2:]), LABELS),
        SOFTMAX(),
        lambda net, x, y: entropies(net(*x), y).mean(),
        Cat,
    ),
    # Metrics.
    form("metrics of classes", XY, SOFTMAX(), entropy, metrics=METRICS_OF_CLASSES, measured=classes_by_hand),
    form("metrics of values", (X, VALUES), "mse", squares, metrics=METRICS_OF_VALUES, measured=values_by_hand),
    form(
        "metrics without ignored targets",
        (X, GAPPED),
        cross_entropy(),
        lambda net, x, y: mean(entropies(net(x), y), counted(y)),
        metrics=["accuracy", "top5"],
        measured=counted_by_hand,
    ),
    form(
        "metrics of odds",
        (X, ODDS),
        SOFTMAX(sparse_label=False),
        gluon_loss(SOFTMAX, sparse_label=False),
        metrics=["accuracy", "top5"],
        measured=lambda net, x, y: {
            "accuracy": hit(net(x), y.argmax(axis=1)),
            "top5": in_top5(net(x), y.argmax(axis=1)),
        },
    ),
    form(
        "accuracy of flags",
        (X, FLAGS[:, :1]),
        gluon.loss.SigmoidBCELoss(),
        gluon_loss(gluon.loss.SigmoidBCELoss),
        narrow,
        ["accuracy"],
        lambda net, x, y: {"accuracy": (net(x) > 0) == (y > 0.5)},
    ),
    form(
        "accuracy of many flags",
        (X, FLAGS),
        gluon.loss.SigmoidBCELoss(),
        gluon_loss(gluon.loss.SigmoidBCELoss),
        metrics=["accuracy"],
        measured=lambda net, x, y: {"accuracy": (net(x) > 0) == (y > 0.5)},
    ),
    form(
        "accuracy of a column and plain flags",
        (X, FLAGS[:, 0]),
        gluon.loss.SigmoidBCELoss(),
        gluon_loss(gluon.loss.SigmoidBCELoss),
        narrow,
        ["accuracy"],
        lambda net, x, y: {"accuracy": (net(x) > 0).squeeze(axis=1) == (y > 0.5)},
    ),
    form(
        "a metric in a list",
        (X[:16], LABELS[:16]),  # two examples in a shard: a list of two is no (sum, weight)
        SOFTMAX(),
        entropy,
        metrics={"listed": lambda out, y: hit(out, y).asnumpy().tolist()},
        measured=lambda net, x, y: {"listed": hit(net(x), y)},
    ),
]
