"""JAX: forms, each beside the plain JAX it stands for. Models are flax.nnx, which hold their own variables."""

import os
from dataclasses import dataclass
from functools import partial

os.environ.setdefault("NPROC", "64")  # as Lockstep sets it; here before JAX wakes, for all tests of this process

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lockstep
from backends.kit import (
    CLASS_WEIGHTS,
    CLASSES,
    EXAMPLE_WEIGHTS,
    GAPPED,
    HIDDEN,
    IGNORED,
    LABELS,
    NUM_EXAMPLES,
    VALUES,
    WEIGHTS,
    Form,
    X,
)
from lockstep.backends import jax as module
from lockstep.backends.jax import CrossEntropy, SquaredError

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)

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

compiles = True  # every shape of a shard anew

HEAVY = jnp.asarray(CLASS_WEIGHTS)
ODDS = np.exp(VALUES) / np.exp(VALUES).sum(1, keepdims=True)
FLAGS = (VALUES > 0).astype(float)
PADDING = -100
LENGTHS = 1 + np.arange(NUM_EXAMPLES) * 6 // NUM_EXAMPLES  # 1 to 6 tokens, so that shards have unequal counts
TOKENS = np.random.Generator(np.random.PCG64(4)).integers(0, 11, (NUM_EXAMPLES, 6))
TAGS = np.where(np.arange(6) < LENGTHS[:, None], TOKENS % CLASSES, PADDING)


class Net(nnx.Module):
    """Dense layers, ReLU between them, dropout before the last."""

    def __init__(self, weights, dropout):
        self.layers = nnx.List()
        for index in range(len(weights) // 2):
            layer = nnx.Linear(*weights[f"{index}.weight"].shape, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
            layer.kernel[...] = jnp.asarray(weights[f"{index}.weight"])
            layer.bias[...] = jnp.asarray(weights[f"{index}.bias"])
            self.layers.append(layer)
        self.dropout = nnx.Dropout(dropout, rngs=nnx.Rngs(0))

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](self.dropout(x))


def model(weights, dropout=0.0):
    return Net(weights, dropout)


def sgd(model, lr, momentum=0.0):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=lr, momentum=momentum)
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def cross_entropy():
    return CrossEntropy(ignore_index=IGNORED)


def weights(model):
    return {".".join(map(str, path)): np.array(value) for path, value in params(model)}


def params(model):
    return nnx.to_flat_state(nnx.as_pure(nnx.state(model, nnx.Param)))


def nudge(model):
    model.layers[0].kernel[...] = model.layers[0].kernel[...].at[0, 0].add(1)


def short(out, y):
    """The first output, as a loss in a type too short for most shares."""
    return out[0, 0].astype(jnp.bfloat16)


def set_rate(optimizer, lr):
    optimizer.opt_state.hyperparams["learning_rate"][...] = jnp.asarray(lr, float)


class normalized:
    """Batch norm alone: a model, what a plain pass over some examples leaves in it, and how to read that."""

    counters = ("calls",)
    loss = "mse"

    class Counting(nnx.Module):
        """Batch norm in float64 (flax keeps its statistics in float32) that counts its calls."""

        def __init__(self):
            self.scale = nnx.Param(jnp.ones(X.shape[1]))
            self.mean = nnx.BatchStat(jnp.zeros(X.shape[1]))
            self.var = nnx.BatchStat(jnp.ones(X.shape[1]))
            self.calls = nnx.Variable(jnp.zeros((), jnp.uint32))
            self.use_running_average = False

        def __call__(self, x):
            mean, var = (self.mean[...], self.var[...]) if self.use_running_average else (x.mean(0), x.var(0))
            if not self.use_running_average:
                self.calls[...] += 1
                self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
                self.var[...] = 0.9 * self.var[...] + 0.1 * var
            return (x - mean) / jnp.sqrt(var + 1e-5) * self.scale

    @staticmethod
    def model():
        return normalized.Counting()

    @staticmethod
    def run(model, x):
        model.train()
        model(jnp.asarray(x))

    @staticmethod
    def read(model):
        return {
            "mean": np.array(model.mean[...]),
            "var": np.array(model.var[...]),
            "calls": np.array(model.calls[...]),
        }


class Cat(nnx.Module):
    """Inputs by position or by name."""

    def __init__(self):
        self.inner = model(WEIGHTS)

    def __call__(self, left, right):
        return self.inner(jnp.concatenate([left, right], 1))


class Tagger(nnx.Module):
    """(examples, tokens) in, (examples, tokens, classes) out."""

    def __init__(self):
        rngs = nnx.Rngs(5)
        self.embedding = nnx.Embed(11, HIDDEN, param_dtype=jnp.float64, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, CLASSES, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embedding(tokens))


@jax.tree_util.register_dataclass
@dataclass
class Output:
    loss: jax.Array
    logits: jax.Array


class Complete(nnx.Module):
    """A model that brings its own loss."""

    def __init__(self, kind=Output):
        self.inner = model(WEIGHTS)
        self.kind = kind

    def __call__(self, x, labels):
        logits = self.inner(x)
        return self.kind(loss=entropies_of(logits, labels).mean(), logits=logits)


def mlp():
    return model(WEIGHTS)


def narrow():
    return model({**WEIGHTS, "1.weight": WEIGHTS["1.weight"][:, :1], "1.bias": WEIGHTS["1.bias"][:1]})


def arrays(batch):
    if isinstance(batch, dict):
        return {key: arrays(value) for key, value in batch.items()}
    return tuple(map(arrays, batch)) if isinstance(batch, tuple) else jnp.asarray(batch)


def lines(loss, measured=lambda net, *batch: {}):
    """By hand: one pass over the whole batch, forward and backward."""

    def by_hand(net, batch):
        parts = arrays(batch)
        parts = parts if isinstance(parts, tuple) else (parts,)
        value, gradients = nnx.value_and_grad(loss)(net, *parts)
        found = {".".join(map(str, path)): np.array(each) for path, each in nnx.to_flat_state(nnx.as_pure(gradients))}
        return float(value), found, {key: float(each) for key, each in measured(net, *parts).items()}

    return by_hand


def form(name, batch, loss, by_hand, model=mlp, metrics=(), measured=lambda net, *batch: {}):
    return Form(name, batch, loss, lines(by_hand, measured), model, metrics)


entropies_of = optax.softmax_cross_entropy_with_integer_labels


def entropies(net, x, y):
    return entropies_of(net(x), jnp.where(y < 0, 0, y))


def entropy(net, x, y):
    return entropies(net, x, y).mean()


def per_example(out, y):
    return ((out - y) ** 4).mean(1)


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def squares(net, x, y):
    return ((net(x) - y) ** 2).mean()


def share(hits):
    return hits.astype(float).mean()


def wide(weights):
    return weights[:, None]


def pair(out, y):
    """A loss that says itself what it divides by."""
    counted = y != IGNORED
    return (entropies_of(out, y) * counted).sum(), counted.sum()


@lockstep.objective
def mean_objective(net, batch):
    return entropies_of(net(batch["x"]), batch["y"]).mean()


@lockstep.objective
def measuring_objective(net, batch):
    out = net(batch["x"])
    hits = (out.argmax(1) == batch["y"]).astype(float)
    low = batch["y"] < 4
    values = {"mean": hits.mean(), "each": hits, "low": ((hits * low).sum(), low.sum())}
    return entropies_of(out, batch["y"]).mean(), values


def hits_by_hand(net, batch):
    hits = (net(batch["x"]).argmax(1) == batch["y"]).astype(float)
    return {"mean": hits.mean(), "each": hits.mean(), "low": hits[batch["y"] < 4].mean()}


@lockstep.objective
def pair_objective(net, batch):
    counted = (batch["y"] != IGNORED).astype(float)
    return (entropies_of(net(batch["x"]), batch["y"]) * counted).sum(), counted.sum()


@lockstep.objective
def spreading_pair_objective(net, batch):
    """A tenth of every loss counts, also in a shard whose weight is 0."""
    counted = (batch["y"] != IGNORED).astype(float)
    return (entropies_of(net(batch["x"]), batch["y"]) * (counted + 0.1)).sum(), counted.sum()


@lockstep.objective
def measuring_pair_objective(net, batch):
    return pair_objective(net, batch), {"size": jnp.abs(batch["x"]).mean(1)}


@lockstep.objective
def objective_of_examples(net, batch):
    return entropies_of(net(batch["x"]), batch["y"])


@lockstep.objective
def objective_of_parts(net, batch):
    """Reaches into the model."""
    hidden = nnx.relu(net.layers[0](batch["x"]))
    return entropies_of(net.layers[1](hidden), batch["y"]).mean()


def hit(out, y):
    return out.argmax(1) == y


def hits_of_low(out, y):
    return (hit(out, y) * (y < 4)).sum(), (y < 4).sum()


def squared(out, y):
    return ((out - y) ** 2).sum(), out.size


def confusion(out, y):
    return jax.nn.one_hot(y * CLASSES + out.argmax(1), CLASSES**2).sum(0)


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


def classes_by_hand(net, x, y):
    out = net(x)
    right = (out.argmax(1) == y).astype(float)
    top5 = [label in row[:5] for label, row in zip(np.array(y), np.argsort(-np.array(out), 1), strict=True)]
    return {"accuracy": right.mean(), "hit": right.mean(), "trace": right.mean(), "low": right[y < 4].mean()} | {
        "top5": np.mean(top5)
    }


def values_by_hand(net, x, y):
    error = net(x) - y
    return {"mse": (error**2).mean(), "mae": jnp.abs(error).mean(), "rmse": jnp.sqrt((error**2).mean())}


def counted_by_hand(net, x, y, ignored=IGNORED):
    out, counted = net(x), y != ignored
    top5 = (jnp.argsort(-out, -1)[..., :5] == y[..., None]).any(-1)
    return {"accuracy": share((out.argmax(-1) == y)[counted]), "top5": share(top5[counted])}


XY = (X, LABELS)
XYW = (X, LABELS, EXAMPLE_WEIGHTS)
NAMED = {"x": X, "y": LABELS}
NAMED_GAPPED = {"x": X, "y": GAPPED}


def squared_sum(out, y):
    return ((out - y) ** 2).sum()


def summed_pair(out, y):
    return lockstep.Sum((entropies_of(out, y) * (y != IGNORED)).sum(), (y != IGNORED).sum())


def pair_by_hand(net, x, y):
    return mean(entropies(net, x, y), y != IGNORED)


@lockstep.objective
def sum_objective(net, batch):
    return summed_pair(net(batch["x"]), batch["y"])


@lockstep.objective
def whole_sum(net, batch):
    return lockstep.Sum(entropies(net, **batch).sum())


forms = [
    # Means over examples.
    form("cross entropy", XY, "cross_entropy", entropy),
    form("optax's function", XY, entropies_of, entropy),
    form("a lambda of one number", XY, lambda out, y: entropies_of(out, y).mean(), entropy),
    form("odds as targets", (X, ODDS), optax.softmax_cross_entropy, lambda net, x, y: mean_odds(net, x, y)),
    form("odds as targets, by name", (X, ODDS), "cross_entropy", lambda net, x, y: mean_odds(net, x, y)),
    form(
        "odds as targets, class weights",
        (X, ODDS),
        CrossEntropy(weights=tuple(CLASS_WEIGHTS)),
        lambda net, x, y: -(jax.nn.log_softmax(net(x)) * y * HEAVY).sum(1).mean(),
    ),
    # Means over the targets that count.
    form("ignored targets", (X, GAPPED), cross_entropy(), lambda net, x, y: mean(entropies(net, x, y), y != IGNORED)),
    form("(sum, weight)", (X, GAPPED), pair, lambda net, x, y: mean(entropies(net, x, y), y != IGNORED)),
    form(
        "class weights",
        XY,
        CrossEntropy(weights=tuple(CLASS_WEIGHTS)),
        lambda net, x, y: mean(entropies(net, x, y), HEAVY[y]),
    ),
    form(
        "class weights and ignored targets",
        (X, GAPPED),
        CrossEntropy(IGNORED, tuple(CLASS_WEIGHTS)),
        lambda net, x, y: mean(entropies(net, x, y), HEAVY[y] * (y != IGNORED)),
    ),
    form(
        "padded sequences",
        (TOKENS, TAGS),
        CrossEntropy(PADDING),
        lambda net, x, y: mean(entropies(net, x, y), y != PADDING),
        Tagger,
    ),
    # Example weights.
    form("example weights", XYW, "cross_entropy", lambda net, x, y, w: mean(entropies(net, x, y), w)),
    form("example weights, a function", XYW, entropies_of, lambda net, x, y, w: mean(entropies(net, x, y), w)),
    form(
        "example and class weights",
        XYW,
        CrossEntropy(weights=tuple(CLASS_WEIGHTS)),
        lambda net, x, y, w: mean(entropies(net, x, y), w * HEAVY[y]),
    ),
    form(
        "example weights and ignored targets",
        (X, GAPPED, EXAMPLE_WEIGHTS),
        cross_entropy(),
        lambda net, x, y, w: mean(entropies(net, x, y), w * (y != IGNORED)),
    ),
    form(
        "padded sequences, example weights",
        (TOKENS, TAGS, EXAMPLE_WEIGHTS),
        CrossEntropy(PADDING),
        lambda net, x, y, w: mean(entropies(net, x, y), wide(w) * (y != PADDING)),
        Tagger,
    ),
    form(
        "squares with example weights",
        (X, VALUES, EXAMPLE_WEIGHTS),
        "mse",
        lambda net, x, y, w: mean(((net(x) - y) ** 2).mean(1), w),
    ),
    form(
        "squares with example weights in a column",
        (X, VALUES, EXAMPLE_WEIGHTS[:, None]),
        "mse",
        lambda net, x, y, w: mean(((net(x) - y) ** 2).mean(1), w[:, 0]),
    ),
    form(
        "one value per example, with weights",
        (X, VALUES, EXAMPLE_WEIGHTS),
        per_example,
        lambda net, x, y, w: mean(((net(x) - y) ** 4).mean(1), w),
    ),
    # Sums.
    form("sum", XY, CrossEntropy(reduction="sum"), lambda net, x, y: entropies(net, x, y).sum()),
    form(
        "sum of mean squares",
        (X, VALUES),
        SquaredError(reduction="sum"),
        lambda net, x, y: ((net(x) - y) ** 2).mean(1).sum(),
    ),
    form(
        "sum with example weights",
        XYW,
        CrossEntropy(reduction="sum"),
        lambda net, x, y, w: (entropies(net, x, y) * w).sum(),
    ),
    # One value per example, and means over elements.
    form("one value per example", (X, VALUES), per_example, lambda net, x, y: ((net(x) - y) ** 4).mean()),
    form("several values per example", (X, VALUES), optax.squared_error, squares),
    form("squares", (X, VALUES), "mse", squares),
    form(
        "huber",
        (X, VALUES),
        partial(optax.huber_loss, delta=0.5),
        lambda net, x, y: optax.huber_loss(net(x), y, delta=0.5).mean(),
    ),
    form(
        "flags",
        (X, FLAGS),
        optax.sigmoid_binary_cross_entropy,
        lambda net, x, y: optax.sigmoid_binary_cross_entropy(net(x), y).mean(),
    ),
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
        "objective of (sum, weight)",
        NAMED_GAPPED,
        pair_objective,
        lambda net, batch: mean(entropies(net, **batch), batch["y"] != IGNORED),
    ),
    form(
        "objective of (sum, weight), a shard's weight 0 and its sum not",
        NAMED_GAPPED,
        spreading_pair_objective,
        lambda net, batch: (
            (entropies(net, **batch) * ((batch["y"] != IGNORED) + 0.1)).sum() / (batch["y"] != IGNORED).sum()
        ),
    ),
    form(
        "objective of (sum, weight) with values",
        NAMED_GAPPED,
        measuring_pair_objective,
        lambda net, batch: mean(entropies(net, **batch), batch["y"] != IGNORED),
        measured=lambda net, batch: {"size": jnp.abs(batch["x"]).mean()},
    ),
    form("objective of examples", NAMED, objective_of_examples, lambda net, batch: entropy(net, **batch)),
    form("objective of the model's parts", NAMED, objective_of_parts, lambda net, batch: entropy(net, **batch)),
    form("objective of a Sum", NAMED_GAPPED, sum_objective, lambda net, batch: pair_by_hand(net, **batch)),
    form("objective of a Sum without a count", NAMED, whole_sum, lambda net, batch: entropies(net, **batch).sum()),
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
        lambda net, batch: {"accuracy": share(net.inner(batch["x"]).argmax(1) == batch["labels"])},
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
        ({"left": X[:, :2], "right": X[:, 2:]}, LABELS),
        "cross_entropy",
        lambda net, x, y: entropies_of(net(**x), y).mean(),
        Cat,
    ),
    form(
        "inputs by position",
        ((X[:, :2], X[:, 2:]), LABELS),
        "cross_entropy",
        lambda net, x, y: entropies_of(net(*x), y).mean(),
        Cat,
    ),
    # Metrics.
    form("metrics of classes", XY, "cross_entropy", entropy, metrics=METRICS_OF_CLASSES, measured=classes_by_hand),
    form("metrics of values", (X, VALUES), "mse", squares, metrics=METRICS_OF_VALUES, measured=values_by_hand),
    form(
        "metrics without ignored targets",
        (X, GAPPED),
        cross_entropy(),
        lambda net, x, y: mean(entropies(net, x, y), y != IGNORED),
        metrics=["accuracy", "top5"],
        measured=counted_by_hand,
    ),
    form(
        "metrics without padding",
        (TOKENS, TAGS),
        CrossEntropy(PADDING),
        lambda net, x, y: mean(entropies(net, x, y), y != PADDING),
        Tagger,
        ["accuracy", "top5"],
        partial(counted_by_hand, ignored=PADDING),
    ),
    form(
        "metrics of odds",
        (X, ODDS),
        optax.softmax_cross_entropy,
        lambda net, x, y: mean_odds(net, x, y),
        metrics=["accuracy", "top5"],
        measured=lambda net, x, y: counted_by_hand(net, x, y.argmax(1), PADDING),
    ),
    form(
        "accuracy of flags",
        (X, FLAGS[:, :1]),
        optax.sigmoid_binary_cross_entropy,
        lambda net, x, y: optax.sigmoid_binary_cross_entropy(net(x), y).mean(),
        narrow,
        ["accuracy"],
        lambda net, x, y: {"accuracy": share((net(x) > 0) == (y > 0.5))},
    ),
    form(
        "accuracy of many flags",
        (X, FLAGS),
        optax.sigmoid_binary_cross_entropy,
        lambda net, x, y: optax.sigmoid_binary_cross_entropy(net(x), y).mean(),
        metrics=["accuracy"],
        measured=lambda net, x, y: {"accuracy": share((net(x) > 0) == (y > 0.5))},
    ),
    form(
        "accuracy of a column and plain flags",
        (X, FLAGS[:, 0]),
        lambda out, y: optax.sigmoid_binary_cross_entropy(out[:, 0], y),
        lambda net, x, y: optax.sigmoid_binary_cross_entropy(net(x)[:, 0], y).mean(),
        narrow,
        ["accuracy"],
        lambda net, x, y: {"accuracy": share((net(x)[:, 0] > 0) == (y > 0.5))},
    ),
]


def mean_odds(net, x, y):
    return optax.softmax_cross_entropy(net(x), y).mean()
