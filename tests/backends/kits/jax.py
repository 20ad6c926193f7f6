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
    NUM_EXAMPLES,
    VALUES,
    WEIGHTS,
    Form,
    X,
)
from backends.oracle import make_form
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

HEAVY = tuple(CLASS_WEIGHTS)
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


def same(name, loss, model=mlp, metrics=(), like=None):
    """A form whose results numpy knows."""
    return make_form(weights, name, loss, model, metrics, like)


entropies_of = optax.softmax_cross_entropy_with_integer_labels


def entropies(net, x, y):
    return entropies_of(net(x), jnp.where(y < 0, 0, y))


def entropy(net, x, y):
    return entropies(net, x, y).mean()


def per_example(out, y):
    return ((out - y) ** 4).mean(1)


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


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


def measure_without_padding(net, x, y):
    out, counted = net(x), y != PADDING
    top5 = (jnp.argsort(-out, -1)[..., :5] == y[..., None]).any(-1)
    return {"accuracy": share((out.argmax(-1) == y)[counted]), "top5": share(top5[counted])}


def squared_sum(out, y):
    return ((out - y) ** 2).sum()


def summed_pair(out, y):
    return lockstep.Sum((entropies_of(out, y) * (y != IGNORED)).sum(), (y != IGNORED).sum())


@lockstep.objective
def sum_objective(net, batch):
    return summed_pair(net(batch["x"]), batch["y"])


@lockstep.objective
def whole_sum(net, batch):
    return lockstep.Sum(entropies(net, **batch).sum())


forms = [
    # Means over examples.
    same("cross entropy", "cross_entropy"),
    same("optax's function", entropies_of, like="cross entropy"),
    same("a lambda of one number", lambda out, y: entropies_of(out, y).mean(), like="cross entropy"),
    same("probabilities as targets", optax.softmax_cross_entropy),
    same("probabilities as targets, by name", "cross_entropy", like="probabilities as targets"),
    same("probabilities as targets, class weights", CrossEntropy(weights=HEAVY)),
    # Means over the targets that count.
    same("ignored targets", cross_entropy()),
    same("(sum, weight)", pair, like="ignored targets"),
    same("class weights", CrossEntropy(weights=HEAVY)),
    same("class weights and ignored targets", CrossEntropy(IGNORED, HEAVY)),
    form(
        "padded sequences",
        (TOKENS, TAGS),
        CrossEntropy(PADDING),
        lambda net, x, y: mean(entropies(net, x, y), y != PADDING),
        Tagger,
    ),
    # Example weights.
    same("example weights", "cross_entropy"),
    same("example weights, a function", entropies_of, like="example weights"),
    same("example and class weights", CrossEntropy(weights=HEAVY)),
    same("example weights and ignored targets", cross_entropy()),
    form(
        "padded sequences, example weights",
        (TOKENS, TAGS, EXAMPLE_WEIGHTS),
        CrossEntropy(PADDING),
        lambda net, x, y, w: mean(entropies(net, x, y), wide(w) * (y != PADDING)),
        Tagger,
    ),
    form(
        "sum of sequences, example weights",
        (TOKENS, TAGS % CLASSES, EXAMPLE_WEIGHTS),
        CrossEntropy(reduction="sum"),
        lambda net, x, y, w: (entropies(net, x, y) * wide(w)).sum(),
        Tagger,
    ),
    same("squares with example weights", "mse"),
    same("squares with example weights in a column", "mse"),
    same("one value per example, with weights", per_example),
    # Sums.
    same("sum", CrossEntropy(reduction="sum")),
    same("sum of mean squares", SquaredError(reduction="sum")),
    same("sum with example weights", CrossEntropy(reduction="sum")),
    # One value per example, and means over elements.
    same("one value per example", per_example),
    same("several values per example", optax.squared_error, like="squares"),
    same("squares", "mse"),
    form(
        "huber",
        (X, VALUES),
        partial(optax.huber_loss, delta=0.5),
        lambda net, x, y: optax.huber_loss(net(x), y, delta=0.5).mean(),
    ),
    same("binary targets", optax.sigmoid_binary_cross_entropy),
    # Objectives.
    same("objective", mean_objective),
    same("objective with values", measuring_objective),
    same("objective of (sum, weight)", pair_objective),
    same("objective of (sum, weight), a shard's weight 0 and its sum not", spreading_pair_objective),
    form(
        "objective of (sum, weight) with values",
        {"x": X, "y": GAPPED},
        measuring_pair_objective,
        lambda net, batch: mean(entropies(net, **batch), batch["y"] != IGNORED),
        measured=lambda net, batch: {"size": jnp.abs(batch["x"]).mean()},
    ),
    same("objective of examples", objective_of_examples, like="objective"),
    same("objective of the model's parts", objective_of_parts, like="objective"),
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
    same("inputs by name", "cross_entropy", Cat),
    same("inputs by position", "cross_entropy", Cat),
    # Metrics.
    same("metrics of classes", "cross_entropy", metrics=METRICS_OF_CLASSES),
    same("metrics of values", "mse", metrics=METRICS_OF_VALUES),
    same("metrics without ignored targets", cross_entropy(), metrics=["accuracy", "top5"]),
    form(
        "metrics without padding",
        (TOKENS, TAGS),
        CrossEntropy(PADDING),
        lambda net, x, y: mean(entropies(net, x, y), y != PADDING),
        Tagger,
        ["accuracy", "top5"],
        measure_without_padding,
    ),
    same("metrics of probabilities", optax.softmax_cross_entropy, metrics=["accuracy", "top5"]),
    same("accuracy of binary targets", optax.sigmoid_binary_cross_entropy, narrow, ["accuracy"]),
    same("accuracy of many binary targets", optax.sigmoid_binary_cross_entropy, metrics=["accuracy"]),
    same(
        "accuracy of a column and a vector of binary targets",
        lambda out, y: optax.sigmoid_binary_cross_entropy(out[:, 0], y),
        narrow,
        ["accuracy"],
    ),
]
