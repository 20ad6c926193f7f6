"""TensorFlow: forms, each beside the plain TensorFlow it stands for."""

import keras
import numpy as np
import tensorflow as tf

import lockstep
from backends.kit import (
    CLASSES,
    EXAMPLE_WEIGHTS,
    GAPPED,
    IGNORED,
    LABELS,
    VALUES,
    WEIGHTS,
    Form,
    X,
)
from lockstep.backends import tensorflow as module

__all__ = ["compiles", "cross_entropy", "forms", "model", "module", "nudge", "set_rate", "sgd", "short", "weights"]

tf.config.threading.set_intra_op_parallelism_threads(1)
compiles = True


class Net:
    """Dense layers from scratch; a function and its variables are `model`."""

    def __init__(self, weights, dropout):
        self.variables = [tf.Variable(value, name=name) for name, value in weights.items()]
        self.dropout = dropout

    def __call__(self, x, training=False, seed=None):
        w, b, v, c = self.variables
        hidden = tf.nn.relu(x @ w + b)
        if training and self.dropout:
            hidden = tf.nn.experimental.stateless_dropout(hidden, self.dropout, seed=seed)
        return hidden @ v + c


def model(weights, dropout=0.0):
    net = Net(weights, dropout)
    return net, net.variables


def sgd(model, lr, momentum=0.0):
    return keras.optimizers.SGD(lr, momentum)


def cross_entropy(reduction="mean_with_sample_weight", ignored=IGNORED):
    return keras.losses.SparseCategoricalCrossentropy(True, ignored, reduction, dtype="float64")


def weights(model):
    return {variable.name.partition(":")[0]: variable.numpy() for variable in model[1]}


def nudge(model):
    model[1][0][0, 0].assign(model[1][0][0, 0] + 1)


def short(out, y):
    """The first output, as a loss in a type too short for most shares."""
    return tf.cast(out[0, 0], tf.bfloat16)


def set_rate(optimizer, lr):
    optimizer.learning_rate = lr


def entropies(net, x, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x))


def mean(values, weights):
    return tf.reduce_sum(values * weights) / tf.reduce_sum(weights)


def counted(y):
    return tf.cast(y != IGNORED, tf.float64)


def squares(net, x, y):
    return tf.reduce_mean((net(x) - y) ** 2, 1)


def form(name, batch, loss, by_hand, metrics=(), measured=lambda net, *batch: {}, make=lambda: model(WEIGHTS)):
    def run(model, batch):
        net, variables = model
        parts = batch if isinstance(batch, tuple) else (batch,)
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(by_hand(net, *parts))
        found = tape.gradient(value, variables)
        gradients = {name: each.numpy() for name, each in zip(weights(model), found, strict=True)}
        return float(value), gradients, {name: float(each) for name, each in measured(net, *parts).items()}

    return Form(name, batch, loss, run, make, metrics)


def hit(out, y):
    return tf.argmax(out, 1) == y


def hits_of_low(out, y):
    low = tf.cast(y < 4, tf.float64)
    return tf.reduce_sum(tf.cast(hit(out, y), tf.float64) * low), tf.reduce_sum(low)


def squared(out, y):
    return tf.reduce_sum((out - y) ** 2), tf.size(out)


def confusion(out, y):
    return tf.reduce_sum(tf.one_hot(y * CLASSES + tf.argmax(out, 1), CLASSES**2, dtype=tf.float64), 0)


def classes_by_hand(net, x, y):
    out = net(x).numpy()
    right = (out.argmax(1) == y).astype(float)
    top5 = [label in row[:5] for label, row in zip(y, np.argsort(-out, 1), strict=True)]
    return {
        "accuracy": right.mean(),
        "hit": right.mean(),
        "trace": right.mean(),
        "low": right[y < 4].mean(),
        "top5": np.mean(top5),
    }


def values_by_hand(net, x, y):
    error = net(x).numpy() - y
    return {"mse": (error**2).mean(), "mae": abs(error).mean(), "rmse": (error**2).mean() ** 0.5}


FLAGS = (VALUES > 0).astype(float)
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


@lockstep.objective
def mean_objective(net, batch):
    return tf.reduce_mean(entropies(net, batch["x"], batch["y"]))


@lockstep.objective
def objective_of_examples(net, batch):
    return entropies(net, batch["x"], batch["y"])


@lockstep.objective
def measuring_objective(net, batch):
    hits = tf.cast(hit(net(batch["x"]), batch["y"]), tf.float64)
    low = tf.cast(batch["y"] < 4, tf.float64)
    values = {"mean": tf.reduce_mean(hits), "each": hits, "low": (tf.reduce_sum(hits * low), tf.reduce_sum(low))}
    return mean_objective(net, batch), values


@lockstep.objective
def pair_objective(net, batch):
    there = counted(batch["y"])
    return tf.reduce_sum(entropies(net, batch["x"], batch["y"]) * there), tf.reduce_sum(there)


@lockstep.objective
def spreading_pair_objective(net, batch):
    """A tenth of every loss counts, also in a shard whose weight is 0."""
    there = counted(batch["y"])
    return tf.reduce_sum(entropies(net, batch["x"], batch["y"]) * (there + 0.1)), tf.reduce_sum(there)


def hits_by_hand(net, batch):
    right = (net(batch["x"]).numpy().argmax(1) == batch["y"]).astype(float)
    return {"mean": right.mean(), "each": right.mean(), "low": right[batch["y"] < 4].mean()}


def halves(weights=WEIGHTS):
    """A function of two inputs that is handed its variables."""
    variables = [tf.Variable(value, name=name) for name, value in weights.items()]

    def net(left, right, params=variables):
        w, b, v, c = params
        return tf.nn.relu(tf.concat([left, right], 1) @ w + b) @ v + c

    return net, variables


def complete(with_logits=True):
    """A function that brings its own loss."""
    net, variables = model(WEIGHTS)

    def run(x, labels):
        logits = net(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return {"loss": loss, "logits": logits} if with_logits else {"loss": loss}

    return run, variables


def traced(weights=WEIGHTS):
    """A tf.function that was traced before it was wrapped."""
    net, variables = model(weights)
    function = tf.function(lambda x: net(x))
    function(X[:2])
    return function, variables


XY = (X, LABELS)
ODDS = np.exp(VALUES) / np.exp(VALUES).sum(1, keepdims=True)
XYW = (X, LABELS, EXAMPLE_WEIGHTS)
NAMED = {"x": X, "y": LABELS}
SQUARES = keras.losses.MeanSquaredError(dtype="float64")


def squared_sum(out, y):
    return tf.reduce_sum((out - y) ** 2)


class SquaredSum(keras.losses.Loss):
    """Keras means over the one number that it gives."""

    def call(self, y_true, y_pred):
        return squared_sum(y_pred, y_true)


def summed_pair(out, y):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, out)
    return lockstep.Sum(tf.reduce_sum(losses * counted(y)), tf.reduce_sum(counted(y)))


def pair_by_hand(net, x, y):
    return mean(entropies(net, x, y), counted(y))


@lockstep.objective
def sum_objective(net, batch):
    return summed_pair(net(batch["x"]), batch["y"])


@lockstep.objective
def whole_sum(net, batch):
    return lockstep.Sum(tf.reduce_sum(entropies(net, **batch)))


forms = [
    form("cross entropy", XY, "cross_entropy", entropies),
    form("a function", XY, lambda out, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, out), entropies),
    form("a traced function", XY, "cross_entropy", entropies, make=traced),
    form("a Keras loss", XY, cross_entropy("sum_over_batch_size", None), entropies),
    form("a Keras loss's name", (X, VALUES), "mean_squared_error", squares),
    form("a Keras function", (X, VALUES), keras.losses.mean_squared_error, squares),
    form("ignored targets", (X, GAPPED), cross_entropy(), lambda net, x, y: mean(entropies(net, x, y), counted(y))),
    form(
        "ignored targets, mean over the batch",
        (X, GAPPED),
        cross_entropy("sum_over_batch_size"),
        lambda net, x, y: mean(entropies(net, x, y), counted(y)),
    ),
    form("example weights", XYW, "cross_entropy", lambda net, x, y, w: mean(entropies(net, x, y), w)),
    form(
        "example weights as Keras has them",
        (X, VALUES, EXAMPLE_WEIGHTS),
        SQUARES,
        lambda net, x, y, w: tf.reduce_mean(squares(net, x, y) * w),
    ),
    form(
        "example weights and ignored targets",
        (X, GAPPED, EXAMPLE_WEIGHTS),
        cross_entropy(),
        lambda net, x, y, w: mean(entropies(net, x, y), w * counted(y)),
    ),
    form(
        "example weights and ignored targets, mean over the batch",
        (X, GAPPED, EXAMPLE_WEIGHTS),
        cross_entropy("sum_over_batch_size"),
        lambda net, x, y, w: tf.reduce_sum(entropies(net, x, y) * w * counted(y)) / tf.reduce_sum(counted(y)),
    ),
    form("sum", XY, cross_entropy("sum", None), lambda net, x, y: tf.reduce_sum(entropies(net, x, y))),
    form(
        "sum with example weights",
        XYW,
        cross_entropy("sum", None),
        lambda net, x, y, w: tf.reduce_sum(entropies(net, x, y) * w),
    ),
    form("no reduction", XY, cross_entropy("none", None), entropies),
    form("squares", (X, VALUES), "mse", squares),
    form(
        "squares with example weights",
        (X, VALUES, EXAMPLE_WEIGHTS),
        "mse",
        lambda net, x, y, w: mean(squares(net, x, y), w),
    ),
    form(
        "sum of mean squares",
        (X, VALUES),
        keras.losses.MeanSquaredError("sum", dtype="float64"),
        lambda net, x, y: tf.reduce_sum(squares(net, x, y)),
    ),
    form("objective of a Sum", {"x": X, "y": GAPPED}, sum_objective, lambda net, batch: pair_by_hand(net, **batch)),
    form(
        "objective of a Sum without a count",
        NAMED,
        whole_sum,
        lambda net, batch: tf.reduce_sum(entropies(net, **batch)),
    ),
    form("a function that is a sum", (X, VALUES), squared_sum, lambda net, x, y: squared_sum(net(x), y)),
    form(
        "a Keras loss that is a sum", (X, VALUES), SquaredSum(dtype="float64"), lambda net, x, y: squared_sum(net(x), y)
    ),
    form("a function that gives a Sum", (X, GAPPED), summed_pair, lambda net, x, y: pair_by_hand(net, x, y)),
    form("objective", NAMED, mean_objective, lambda net, batch: entropies(net, **batch)),
    form("objective of examples", NAMED, objective_of_examples, lambda net, batch: entropies(net, **batch)),
    form(
        "objective with values",
        NAMED,
        measuring_objective,
        lambda net, batch: entropies(net, **batch),
        measured=hits_by_hand,
    ),
    form(
        "objective of (sum, weight)",
        {"x": X, "y": GAPPED},
        pair_objective,
        lambda net, batch: mean(entropies(net, **batch), counted(batch["y"])),
    ),
    form(
        "objective of (sum, weight), a shard's weight 0 and its sum not",
        {"x": X, "y": GAPPED},
        spreading_pair_objective,
        lambda net, batch: (
            tf.reduce_sum(entropies(net, **batch) * (counted(batch["y"]) + 0.1)) / tf.reduce_sum(counted(batch["y"]))
        ),
    ),
    form(
        "inputs by name",
        ({"left": X[:, :2], "right": X[:, 2:]}, LABELS),
        "cross_entropy",
        lambda net, x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(**x)),
        make=halves,
    ),
    form(
        "inputs by position",
        ((X[:, :2], X[:, 2:]), LABELS),
        "cross_entropy",
        lambda net, x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(*x)),
        make=halves,
    ),
    form(
        "an output with a loss",
        {"x": X, "labels": LABELS},
        None,
        lambda net, batch: net(**batch)["loss"],
        ["accuracy"],
        lambda net, batch: {"accuracy": (net(**batch)["logits"].numpy().argmax(1) == batch["labels"]).mean()},
        complete,
    ),
    form(
        "a dict with a loss alone",
        {"x": X, "labels": LABELS},
        None,
        lambda net, batch: net(**batch)["loss"],
        make=lambda: complete(with_logits=False),
    ),
    form("metrics of classes", XY, "cross_entropy", entropies, METRICS_OF_CLASSES, classes_by_hand),
    form(
        "metrics of odds",
        (X, ODDS),
        lambda out, y: tf.nn.softmax_cross_entropy_with_logits(y, out),
        lambda net, x, y: tf.nn.softmax_cross_entropy_with_logits(y, net(x)),
        ["accuracy", "top5"],
        lambda net, x, y: {name: classes_by_hand(net, x, y.argmax(1))[name] for name in ("accuracy", "top5")},
    ),
    form(
        "accuracy of many flags",
        (X, FLAGS),
        tf.keras.losses.BinaryCrossentropy(from_logits=True, dtype="float64"),
        lambda net, x, y: tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, net(x)), -1),
        ["accuracy"],
        lambda net, x, y: {"accuracy": ((net(x).numpy() > 0) == (y > 0.5)).mean()},
    ),
    form("metrics of values", (X, VALUES), "mse", squares, METRICS_OF_VALUES, values_by_hand),
]
