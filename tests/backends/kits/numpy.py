"""numpy: forms of the reference backend, with gradients by complex steps, which know nothing of any backward pass."""

import numpy as np

from backends.kit import (
    CLASS_WEIGHTS,
    EXAMPLE_WEIGHTS,
    GAPPED,
    IGNORED,
    LABELS,
    VALUES,
    WEIGHTS,
    Form,
    X,
)
from lockstep import Metric
from lockstep.backends import numpy as module
from lockstep.backends.numpy import SGD, CrossEntropy, Dense, SquaredError

__all__ = ["compiles", "cross_entropy", "forms", "model", "module", "nudge", "set_rate", "sgd", "weights"]

compiles = False

STEP = 1e-30


def model(weights, dropout=0.0):
    shapes = [value.shape for value in weights.values() if value.ndim == 2]
    made = Dense([shapes[0][0], *(shape[1] for shape in shapes)], seed=0, dropout=dropout)
    made.parameters = {name: np.array(value) for name, value in weights.items()}
    return made


def sgd(model, lr, momentum=0.0):
    return SGD(lr, momentum)


def cross_entropy():
    return CrossEntropy(ignore_index=IGNORED)


def weights(model):
    return {name: value.copy() for name, value in model.parameters.items()}


def nudge(model):
    model.parameters["0.weight"][0, 0] += 1


def set_rate(optimizer, lr):
    optimizer.lr = lr


def outputs(parameters, x):
    hidden = x @ parameters["0.weight"] + parameters["0.bias"]
    return np.where(hidden.real > 0, hidden, 0) @ parameters["1.weight"] + parameters["1.bias"]


def lines(loss, measured=lambda out, *batch: {}):
    """By hand: the loss of the whole batch, and its gradient as the imaginary part of a step into the complex."""

    def by_hand(model, batch):
        parameters = {name: value.astype(complex) for name, value in weights(model).items()}
        gradients = {name: np.empty(value.shape) for name, value in parameters.items()}
        for name, value in parameters.items():
            for place in np.ndindex(value.shape):
                value[place] += STEP * 1j
                gradients[name][place] = loss(outputs(parameters, batch[0]), *batch[1:]).imag / STEP
                value[place] = value[place].real
        out = outputs(parameters, batch[0])
        return loss(out, *batch[1:]).real, gradients, measured(out.real, *batch[1:])

    return by_hand


def entropies(out, y):
    """The cross-entropy of every example."""
    return np.log(np.exp(out).sum(1)) - out[np.arange(len(y)), y]


def squares(out, y):
    return ((out - y) ** 2).mean(1)


def counted(y):
    return (y != IGNORED).astype(float)


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def hit(out, y):
    return (out.argmax(1) == y).astype(float)


def hits_of_low(out, y):
    return hit(out, y)[y < 4].sum(), (y < 4).sum()


def squared(out, y):
    return ((out - y) ** 2).sum(), out.size


METRICS_OF_CLASSES = {"accuracy": "accuracy", "top5": "top5", "hit": hit, "low": hits_of_low}
METRICS_OF_VALUES = {"mse": "mse", "mae": "mae", "rmse": Metric(squared, lambda sums: (sums[0] / sums[1]) ** 0.5)}


def classes_by_hand(out, y):
    best = np.argsort(-out, 1)
    return {
        "accuracy": hit(out, y).mean(),
        "top5": np.mean([label in row[:5] for label, row in zip(y, best, strict=True)]),
        "hit": hit(out, y).mean(),
        "low": hit(out, y)[y < 4].mean(),
    }


def values_by_hand(out, y):
    error = out - y
    return {"mse": (error**2).mean(), "mae": np.abs(error).mean(), "rmse": (error**2).mean() ** 0.5}


def form(name, batch, loss, by_hand, metrics=()):
    return Form(name, batch, loss, by_hand, lambda: model(WEIGHTS), metrics)


forms = [
    form("cross entropy", (X, LABELS), "cross_entropy", lines(lambda out, y: entropies(out, y).mean())),
    form("ignored targets", (X, GAPPED), cross_entropy(), lines(lambda out, y: mean(entropies(out, y), counted(y)))),
    form(
        "class weights",
        (X, LABELS),
        CrossEntropy(weights=tuple(CLASS_WEIGHTS)),
        lines(lambda out, y: mean(entropies(out, y), CLASS_WEIGHTS[y])),
    ),
    form(
        "class weights and ignored targets",
        (X, GAPPED),
        CrossEntropy(IGNORED, tuple(CLASS_WEIGHTS)),
        lines(lambda out, y: mean(entropies(out, y), counted(y) * CLASS_WEIGHTS[y])),
    ),
    form(
        "example weights",
        (X, LABELS, EXAMPLE_WEIGHTS),
        "cross_entropy",
        lines(lambda out, y, w: mean(entropies(out, y), w)),
    ),
    form(
        "example and class weights",
        (X, LABELS, EXAMPLE_WEIGHTS),
        CrossEntropy(weights=tuple(CLASS_WEIGHTS)),
        lines(lambda out, y, w: mean(entropies(out, y), w * CLASS_WEIGHTS[y])),
    ),
    form("sum", (X, LABELS), CrossEntropy(reduction="sum"), lines(lambda out, y: entropies(out, y).sum())),
    form(
        "sum with example weights",
        (X, LABELS, EXAMPLE_WEIGHTS),
        CrossEntropy(reduction="sum"),
        lines(lambda out, y, w: (entropies(out, y) * w).sum()),
    ),
    form("squares", (X, VALUES), "mse", lines(lambda out, y: squares(out, y).mean())),
    form(
        "sum of mean squares", (X, VALUES), SquaredError(reduction="sum"), lines(lambda out, y: squares(out, y).sum())
    ),
    form(
        "squares with example weights",
        (X, VALUES, EXAMPLE_WEIGHTS),
        "mse",
        lines(lambda out, y, w: mean(squares(out, y), w)),
    ),
    form(
        "metrics of classes",
        (X, LABELS),
        "cross_entropy",
        lines(lambda out, y: entropies(out, y).mean(), classes_by_hand),
        METRICS_OF_CLASSES,
    ),
    form(
        "metrics of values",
        (X, VALUES),
        "mse",
        lines(lambda out, y: squares(out, y).mean(), values_by_hand),
        METRICS_OF_VALUES,
    ),
]
