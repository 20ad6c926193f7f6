"""numpy: forms of the reference backend, beside what the oracle says they mean."""

import numpy as np

from backends.kit import CLASS_WEIGHTS, CLASSES, IGNORED, WEIGHTS
from backends.oracle import hit, make_form
from lockstep import Metric
from lockstep.backends import numpy as module
from lockstep.backends.numpy import SGD, Dense, DenseCrossEntropy, DenseSquaredError

__all__ = ["compiles", "cross_entropy", "forms", "model", "module", "nudge", "set_rate", "sgd", "weights"]

compiles = False


def model(weights, dropout=0.0):
    shapes = [value.shape for value in weights.values() if value.ndim == 2]
    made = Dense([shapes[0][0], *(shape[1] for shape in shapes)], seed=0, dropout=dropout)
    made.parameters = {name: np.array(value) for name, value in weights.items()}
    return made


def sgd(model, lr, momentum=0.0):
    return SGD(lr, momentum)


def cross_entropy():
    return DenseCrossEntropy(ignore_index=IGNORED)


def weights(model):
    return {name: value.copy() for name, value in model.parameters.items()}


def nudge(model):
    model.parameters["0.weight"][0, 0] += 1


def set_rate(optimizer, lr):
    optimizer.lr = lr


def same(name, loss, metrics=()):
    return make_form(weights, name, loss, lambda: model(WEIGHTS), metrics)


def hits_of_low(out, y):
    return hit(out, y)[y < 4].sum(), (y < 4).sum()


def squared(out, y):
    return ((out - y) ** 2).sum(), out.size


def confusion(out, y):
    return np.eye(CLASSES**2)[y * CLASSES + out.argmax(1)].sum(0)


METRICS_OF_CLASSES = {
    "accuracy": "accuracy",
    "top5": "top5",
    "hit": hit,
    "low": hits_of_low,
    "trace": Metric(confusion, lambda sums: sums.reshape(CLASSES, CLASSES).trace() / sums.sum()),
}
METRICS_OF_VALUES = {"mse": "mse", "mae": "mae", "rmse": Metric(squared, lambda sums: (sums[0] / sums[1]) ** 0.5)}
HEAVY = tuple(CLASS_WEIGHTS)

forms = [
    same("cross entropy", "cross_entropy"),
    same("ignored targets", cross_entropy()),
    same("class weights", DenseCrossEntropy(weights=HEAVY)),
    same("class weights and ignored targets", DenseCrossEntropy(IGNORED, HEAVY)),
    same("example weights", "cross_entropy"),
    same("example and class weights", DenseCrossEntropy(weights=HEAVY)),
    same("example weights and ignored targets", cross_entropy()),
    same("sum", DenseCrossEntropy(reduction="sum")),
    same("sum with example weights", DenseCrossEntropy(reduction="sum")),
    same("squares", "mse"),
    same("sum of mean squares", DenseSquaredError(reduction="sum")),
    same("squares with example weights", "mse"),
    same("squares with example weights in a column", "mse"),
    same("metrics of classes", "cross_entropy", METRICS_OF_CLASSES),
    same("metrics of values", "mse", METRICS_OF_VALUES),
    same("metrics without ignored targets", cross_entropy(), ["accuracy", "top5"]),
]
