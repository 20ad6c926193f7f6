"""Keras on TensorFlow: forms, each beside the plain Keras it stands for."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import lockstep
from backends.kit import EXAMPLE_WEIGHTS, GAPPED, IGNORED, LABELS, VALUES, WEIGHTS, Form, X
from lockstep.backends import keras as module

__all__ = [
    "compiles",
    "cross_entropy",
    "forms",
    "model",
    "module",
    "normalized",
    "nudge",
    "own_metrics",
    "set_rate",
    "sgd",
    "weights",
]

if keras.config.backend() == "tensorflow" and not tf.config.list_physical_devices("GPU"):
    tf.config.threading.set_intra_op_parallelism_threads(1)
keras.config.set_floatx("float64")  # a compiled loss is cast to it
compiles = True
own_metrics = True  # metric objects of other libraries are refused


def dense(weights, index, **options):
    layer = layers.Dense(weights[f"{index}.bias"].shape[0], dtype="float64", **options)
    layer.build((None, weights[f"{index}.weight"].shape[0]))
    layer.set_weights([weights[f"{index}.weight"], weights[f"{index}.bias"]])
    return layer


def model(weights, dropout=0.0, **options):
    depth = len(weights) // 2
    stack = []
    for index in range(depth):
        if index == depth - 1 and dropout:
            stack.append(layers.Dropout(dropout, dtype="float64"))
        stack.append(dense(weights, index, activation=None if index == depth - 1 else "relu", **options))
    return keras.Sequential([keras.Input(X.shape[1:], dtype="float64"), *stack])


def sgd(model, lr, momentum=0.0):
    return keras.optimizers.SGD(lr, momentum)


def cross_entropy(reduction="mean_with_sample_weight", ignored=IGNORED):
    return keras.losses.SparseCategoricalCrossentropy(True, ignored, reduction, dtype="float64")


def weights(model):
    return {f"{index}.{variable.name}": variable.numpy() for index, variable in enumerate(model.trainable_variables)}


def nudge(model):
    first = model.trainable_variables[0]
    change = np.zeros(first.shape)
    change.flat[0] = 1
    first.assign_add(change)


def set_rate(optimizer, lr):
    optimizer.learning_rate = lr


class normalized:
    """Batch norm alone: a model, what a plain pass over some examples leaves in it, and how to read that."""

    counters = ()
    loss = keras.losses.MeanSquaredError(dtype="float64")

    @staticmethod
    def model():
        layer = layers.BatchNormalization(dtype="float64")
        return keras.Sequential([keras.Input(X.shape[1:], dtype="float64"), layer])

    @staticmethod
    def run(model, x):
        model(x, training=True)

    @staticmethod
    def read(model):
        return {variable.name: variable.numpy() for variable in model.non_trainable_variables}


def entropies(net, x, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x))


def mean(values, weights):
    return tf.reduce_sum(values * weights) / tf.reduce_sum(weights)


def counted(y):
    return tf.cast(y != IGNORED, tf.float64)


def squares(net, x, y):
    return tf.reduce_mean((net(x) - y) ** 2, 1)


def form(name, batch, loss, by_hand, metrics=(), measured=lambda net, *batch: {}, make=lambda: model(WEIGHTS)):
    def run(net, batch):
        parts = batch if isinstance(batch, tuple) else (batch,)
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(by_hand(net, *parts))
        found = tape.gradient(value, net.trainable_variables)
        gradients = {name: each.numpy() for name, each in zip(weights(net), found, strict=True)}
        return float(value), gradients, {name: float(each) for name, each in measured(net, *parts).items()}

    return Form(name, batch, loss, run, make, metrics)


def regularized():
    return model(WEIGHTS, kernel_regularizer=keras.regularizers.L2(0.01))


def two_outputs():
    start = keras.Input(X.shape[1:], dtype="float64")
    hidden = dense(WEIGHTS, 0, activation="relu")(start)
    head = {"0.weight": WEIGHTS["1.weight"], "0.bias": WEIGHTS["1.bias"]}
    values, classes = dense(head, 0, name="values"), dense(head, 0, name="classes")
    return keras.Model(start, {"classes": classes(hidden), "values": values(hidden)})


def both(net, x, y):
    out = net(x)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(y["classes"], out["classes"])
    return tf.reduce_mean(entropy) + tf.reduce_mean((out["values"] - y["values"]) ** 2)


def two_inputs():
    left, right = keras.Input((2,), dtype="float64", name="left"), keras.Input((4,), dtype="float64", name="right")
    together = layers.Concatenate(dtype="float64")([left, right])
    return keras.Model([left, right], model(WEIGHTS)(together))


def masked():
    """Examples of one step each; those whose input is 0 are left out by a mask."""
    start = keras.Input((1, X.shape[1]), dtype="float64")
    hidden = layers.Masking(0.0, dtype="float64")(start)
    return keras.Model(start, dense({"0.weight": WEIGHTS["0.weight"], "0.bias": WEIGHTS["0.bias"]}, 0)(hidden))


MASKED = np.where(np.arange(len(X)) < 9, 0.0, 1.0)
STEPS = (X * MASKED[:, None])[:, None]


def over_mask(net, x, y):
    values = tf.reduce_mean((net(x) - y) ** 2, 2)[:, 0]
    there = tf.cast(tf.reduce_any(x[:, 0] != 0, 1), tf.float64)
    return mean(values, there)


@lockstep.objective
def measuring_objective(net, batch):
    out = net(batch["x"])
    hits = tf.cast(tf.argmax(out, 1) == batch["y"], tf.float64)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], out)), {"hit": hits}


def auc_by_hand(net, x, y):
    metric = keras.metrics.AUC(dtype="float64")
    metric.update_state(y, keras.ops.sigmoid(net(x)))
    return {"auc": metric.result()}


def classes_by_hand(net, x, y):
    out = net(x).numpy()
    right = (out.argmax(1) == y).astype(float)
    return {"accuracy": right.mean(), "low": (right * (y < 4)).mean()}


def values_by_hand(net, x, y):
    error = net(x).numpy() - y
    total = ((y - y.mean(0)) ** 2).sum(0)
    r2 = (1 - (error**2).sum(0) / total).mean()
    return {"root_mean_squared_error": (error**2).mean() ** 0.5, "r2_score": r2}


def weighted_accuracy(net, x, y, w):
    hits = (net(x).numpy().argmax(1) == y).astype(float)
    return {"accuracy": hits.mean(), "weighted": (hits * w).sum() / w.sum()}


def weighing_metrics():
    net = model(WEIGHTS)
    net.compile(
        "sgd",
        cross_entropy("sum_over_batch_size", None),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy", dtype="float64")],
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("weighted", dtype="float64")],
    )
    return net


def low(y_true, y_pred):
    """Hits among the first classes, as a function of Keras's order."""
    y_true = tf.cast(tf.reshape(y_true, (-1,)), tf.int64)
    return tf.cast((tf.argmax(y_pred, 1) == y_true) & (y_true < 4), tf.float64)


XY = (X, LABELS)
XYW = (X, LABELS, EXAMPLE_WEIGHTS)
SQUARES = keras.losses.MeanSquaredError(dtype="float64")
METRICS_OF_CLASSES = [
    keras.metrics.SparseCategoricalAccuracy("accuracy", dtype="float64"),
    low,
]


def squared_sum(y_true, y_pred):
    return tf.reduce_sum((y_pred - y_true) ** 2)


def pair_by_hand(net, x, y):
    return mean(entropies(net, x, y), counted(y))


@lockstep.objective
def sum_objective(net, batch):
    losses = entropies(net, **batch)
    return lockstep.Sum(tf.reduce_sum(losses * counted(batch["y"])), tf.reduce_sum(counted(batch["y"])))


@lockstep.objective
def whole_sum(net, batch):
    return lockstep.Sum(tf.reduce_sum(entropies(net, **batch)))


forms = [
    form("cross entropy", XY, cross_entropy("sum_over_batch_size", None), entropies),
    form("ignored targets", (X, GAPPED), cross_entropy(), lambda net, x, y: mean(entropies(net, x, y), counted(y))),
    form(
        "ignored targets, mean over the batch",
        (X, GAPPED),
        cross_entropy("sum_over_batch_size"),
        lambda net, x, y: mean(entropies(net, x, y), counted(y)),
    ),
    form("example weights", XYW, cross_entropy(ignored=None), lambda net, x, y, w: mean(entropies(net, x, y), w)),
    form(
        "example weights as Keras has them",
        XYW,
        cross_entropy("sum_over_batch_size", None),
        lambda net, x, y, w: tf.reduce_mean(entropies(net, x, y) * w),
    ),
    form(
        "example weights and ignored targets",
        (X, GAPPED, EXAMPLE_WEIGHTS),
        cross_entropy(),
        lambda net, x, y, w: mean(entropies(net, x, y), w * counted(y)),
    ),
    form("a mask of the model's own", (STEPS, X[:, None, :1] * np.ones(7)), SQUARES, over_mask, make=masked),
    form("sum", XY, cross_entropy("sum", None), lambda net, x, y: tf.reduce_sum(entropies(net, x, y))),
    form("a function that is a sum", (X, VALUES), squared_sum, lambda net, x, y: squared_sum(y, net(x))),
    form(
        "a function that is a sum, with regularization",
        (X, VALUES),
        squared_sum,
        lambda net, x, y: squared_sum(y, net(x)) + sum(net.losses),
        make=regularized,
    ),
    form("objective of a Sum", {"x": X, "y": GAPPED}, sum_objective, lambda net, batch: pair_by_hand(net, **batch)),
    form(
        "objective of a Sum without a count",
        {"x": X, "y": LABELS},
        whole_sum,
        lambda net, batch: tf.reduce_sum(entropies(net, **batch)),
    ),
    form("squares", (X, VALUES), SQUARES, squares),
    form(
        "regularization",
        XY,
        cross_entropy("sum_over_batch_size", None),
        lambda net, x, y: tf.reduce_mean(entropies(net, x, y)) + sum(net.losses),
        make=regularized,
    ),
    form(
        "regularization, a loss with a denominator of its own",
        (X, GAPPED),
        cross_entropy(),
        lambda net, x, y: mean(entropies(net, x, y), counted(y)) + sum(net.losses),
        make=regularized,
    ),
    form(
        "two outputs",
        (X, {"classes": LABELS, "values": VALUES}),
        {"classes": cross_entropy("sum_over_batch_size", None), "values": SQUARES},
        both,
        make=two_outputs,
    ),
    form(
        "two inputs",
        ((X[:, :2], X[:, 2:]), LABELS),
        cross_entropy("sum_over_batch_size", None),
        lambda net, x, y: entropies(net, list(x), y),
        make=two_inputs,
    ),
    form(
        "two inputs by name",
        ({"left": X[:, :2], "right": X[:, 2:]}, LABELS),
        cross_entropy("sum_over_batch_size", None),
        entropies,
        make=two_inputs,
    ),
    form(
        "objective with values",
        {"x": X, "y": LABELS},
        measuring_objective,
        lambda net, batch: entropies(net, **batch),
        measured=lambda net, batch: {"hit": (net(batch["x"]).numpy().argmax(1) == batch["y"]).mean()},
    ),
    form(
        "metrics of classes",
        XY,
        cross_entropy("sum_over_batch_size", None),
        entropies,
        METRICS_OF_CLASSES,
        classes_by_hand,
    ),
    form(
        "metrics of values",
        (X, VALUES),
        SQUARES,
        squares,
        [keras.metrics.RootMeanSquaredError(dtype="float64"), keras.metrics.R2Score(dtype="float64")],
        values_by_hand,
    ),
    form(
        "metrics with example weights",
        XYW,
        None,
        lambda net, x, y, w: tf.reduce_mean(entropies(net, x, y) * w),
        measured=weighted_accuracy,
        make=weighing_metrics,
    ),
]
