"""toynet, a framework whose backend is another package's: it is found through that package's entry point."""

import sys
from pathlib import Path

import numpy as np

import lockstep
from backends.kit import CLASSES, IGNORED, WEIGHTS
from backends.oracle import make_form

INSTALLED = str(Path(__file__).parents[1] / "toy")  # a folder as pip leaves it: packages, and *.dist-info
if INSTALLED not in sys.path:
    sys.path.append(INSTALLED)

import lockstep_toynet as module  # noqa: E402
import toynet  # noqa: E402

__all__ = ["compiles", "cross_entropy", "forms", "model", "module", "nudge", "set_rate", "sgd", "weights"]

compiles = False


def model(weights, dropout=0.0):
    return toynet.Dense(weights, dropout)


def sgd(model, lr, momentum=0.0):
    return toynet.SGD(model.parameters, lr, momentum)


def cross_entropy():
    return toynet.CrossEntropy(IGNORED)


def weights(model):
    return {name: array.values.copy() for name, array in model.parameters.items()}


def nudge(model):
    model.parameters["0.weight"].values[0, 0] += 1


def set_rate(optimizer, lr):
    optimizer.lr = lr


def form(name, loss, metrics=(), like=None):
    return make_form(weights, name, loss, lambda: model(WEIGHTS), metrics, like)


def fourths(out, y):
    errors = (out - y) * (out - y)
    return errors * errors


def each_fourth(out, y):
    return module.array_ops.average_rows(fourths(out, y), len(out))


def squares(out, y):
    return ((out - y) * (out - y)).sum()


def mean_square(out, y):
    return ((out - y) * (out - y)).mean()


@lockstep.objective
def objective(model, batch):
    return toynet.CrossEntropy()(model(batch["x"]), batch["y"])


@lockstep.objective
def objective_with_values(model, batch):
    out = model(batch["x"])
    hits, low = hit(out, batch["y"]), batch["y"].values < 4
    values = {"mean": hits.mean(), "each": hits, "low": ((hits * low).sum(), low.sum())}
    return toynet.CrossEntropy()(out, batch["y"]), values


@lockstep.objective
def objective_of_sum(model, batch):
    loss = toynet.CrossEntropy(IGNORED, "sum")
    return lockstep.Sum(loss(model(batch["x"]), batch["y"]), loss.count(batch["y"]).sum())


def hit(out, y):
    return toynet.Array((out.values.argmax(1) == y.values).astype(float))


def hits_of_low(out, y):
    low = y.values < 4
    return (hit(out, y) * low).sum(), low.sum()


def confusion(out, y):
    return toynet.Array(np.eye(CLASSES**2)[y.values * CLASSES + out.values.argmax(1)].sum(0))


def squared(out, y):
    return squares(out, y), out.values.size


METRICS_OF_CLASSES = {
    "accuracy": "accuracy",
    "top5": "top5",
    "hit": hit,
    "low": hits_of_low,
    "trace": lockstep.Metric(confusion, lambda sums: sums.reshape(CLASSES, CLASSES).trace() / sums.sum()),
}
METRICS_OF_VALUES = {
    "mse": "mse",
    "mae": "mae",
    "rmse": lockstep.Metric(squared, lambda sums: (sums[0] / sums[1]) ** 0.5),
}

forms = [
    form("cross entropy", toynet.CrossEntropy()),
    form("ignored targets", cross_entropy()),
    form("example weights", toynet.CrossEntropy()),
    form("example weights and ignored targets", cross_entropy()),
    form("sum", toynet.CrossEntropy(reduction="sum")),
    form("sum with example weights", toynet.CrossEntropy(reduction="sum")),
    form("squares", toynet.SquaredError()),
    form("sum of mean squares", toynet.SquaredError("sum")),
    form("squares with example weights", toynet.SquaredError()),
    form("squares with example weights in a column", toynet.SquaredError()),
    form("one value per example", each_fourth),
    form("one value per example, with weights", each_fourth),
    form("a function that is a sum", squares, like="sum of squares"),
    form("a function", mean_square, like="squares"),
    form("objective", objective),
    form("objective with values", objective_with_values),
    form("objective of (sum, weight)", objective_of_sum),
    form("metrics of classes", toynet.CrossEntropy(), METRICS_OF_CLASSES),
    form("metrics of values", toynet.SquaredError(), METRICS_OF_VALUES),
    form("metrics without ignored targets", cross_entropy(), ["accuracy", "top5"]),
]
