"""What the forms of batch and loss mean that several frameworks have: loss, gradient and metrics in numpy, float64.

Gradients are complex steps: the imaginary part of the loss after a tiny imaginary step of a weight. So nothing here
knows of any backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.kit import CLASS_WEIGHTS, EXAMPLE_WEIGHTS, GAPPED, IGNORED, LABELS, VALUES, WEIGHTS, Form, X

STEP = 1e-30
NARROW = {**WEIGHTS, "1.weight": WEIGHTS["1.weight"][:, :1], "1.bias": WEIGHTS["1.bias"][:1]}
PROBABILITIES = np.exp(VALUES) / np.exp(VALUES).sum(1, keepdims=True)
BINARY = (VALUES > 0).astype(float)


@dataclass(frozen=True)
class Meaning:
    """A batch, and what its loss and metrics are: functions of the outputs and the rest of the batch."""

    batch: Any
    loss: Callable[..., Any]
    metrics: Callable[..., dict[str, Any]] = field(default=lambda out, *rest: {})
    weights: Any = field(default_factory=lambda: WEIGHTS)


def outputs(weights, x):
    """The dense network of the kits."""
    hidden = x @ weights["0.weight"] + weights["0.bias"]
    return np.where(hidden.real > 0, hidden, 0) @ weights["1.weight"] + weights["1.bias"]


def read(batch):
    """The inputs in one array, and the rest of the batch."""
    if isinstance(batch, dict):
        return batch["x"], [value for name, value in batch.items() if name != "x"]
    x, *rest = batch
    if isinstance(x, dict):
        x = x["left"], x["right"]
    return np.concatenate(x, 1) if isinstance(x, tuple) else x, [np.asarray(each) for each in rest]


def compute(meaning, batch):
    """The loss of the whole batch, its gradient by weight, and the metrics."""
    x, rest = read(batch)
    weights = {name: value.astype(complex) for name, value in meaning.weights.items()}
    gradients = {name: np.empty(value.shape) for name, value in weights.items()}
    for name, value in weights.items():
        for place in np.ndindex(value.shape):
            value[place] += STEP * 1j
            gradients[name][place] = meaning.loss(outputs(weights, x), *rest).imag / STEP
            value[place] = value[place].real
    out = outputs(weights, x)
    return meaning.loss(out, *rest).real, gradients, meaning.metrics(out.real, *rest)


def rename(gradients, own):
    """The gradients by the names of a framework's weights, which may be transposed; all have shapes of their own."""
    found = {}
    for name, value in own.items():
        (fits,) = [each for each in gradients.values() if sorted(each.shape) == sorted(value.shape)]
        found[name] = fits if fits.shape == value.shape else fits.T
    return found


def make_form(weights_of, name, loss, model, metrics=(), like=None):
    """A form that means what another framework's form of this name, or of the name `like`, means."""
    meaning = MEANINGS[like or name]

    def by_hand(model, batch):
        value, gradients, measured = compute(meaning, batch)
        return value, rename(gradients, weights_of(model)), measured

    return Form(name, meaning.batch, loss, by_hand, model, metrics)


def entropies(out, y):
    """The cross-entropy of every example."""
    return np.log(np.exp(out).sum(1)) - out[np.arange(len(y)), y]


def soft_entropies(out, y, weights=1.0):
    """The cross-entropy of every example's probabilities."""
    return (y * weights * (np.log(np.exp(out).sum(1, keepdims=True)) - out)).sum(1)


def binary_entropies(out, y):
    """The binary cross-entropy of every element."""
    return np.log(1 + np.exp(out)) - y * out


def squares(out, y):
    """The mean square of every example."""
    return ((out - y) ** 2).mean(1)


def fourths(out, y):
    return ((out - y) ** 4).mean(1)


def counted(y):
    return (y != IGNORED).astype(float)


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def hit(out, y):
    return (out.argmax(1) == y).astype(float)


def in_top5(out, y):
    return np.array([label in row[:5] for label, row in zip(y, np.argsort(-out, 1), strict=True)], float)


def measure_classes(out, y):
    right = hit(out, y)
    low = right[y < 4].mean()
    return {"accuracy": right.mean(), "top5": in_top5(out, y).mean(), "hit": right.mean(), "low": low}


def measure_traced_classes(out, y):
    return {**measure_classes(out, y), "trace": hit(out, y).mean()}


def measure_counted(out, y):
    return {"accuracy": mean(hit(out, y), counted(y)), "top5": mean(in_top5(out, y), counted(y))}


def measure_values(out, y):
    error = out - y
    return {"mse": (error**2).mean(), "mae": np.abs(error).mean(), "rmse": (error**2).mean() ** 0.5}


def measure_hits(out, y):
    right = hit(out, y)
    return {"mean": right.mean(), "each": right.mean(), "low": right[y < 4].mean()}


def entropy(out, y):
    return entropies(out, y).mean()


def counted_entropy(out, y):
    return mean(entropies(out, y), counted(y))


XY, XV = (X, LABELS), (X, VALUES)
XYW, XVW = (X, LABELS, EXAMPLE_WEIGHTS), (X, VALUES, EXAMPLE_WEIGHTS)
NAMED, NAMED_GAPPED = {"x": X, "y": LABELS}, {"x": X, "y": GAPPED}

MEANINGS = {
    # Means over examples.
    "cross entropy": Meaning(XY, entropy),
    "probabilities as targets": Meaning((X, PROBABILITIES), lambda out, y: soft_entropies(out, y).mean()),
    "probabilities as targets, class weights": Meaning(
        (X, PROBABILITIES), lambda out, y: soft_entropies(out, y, CLASS_WEIGHTS).mean()
    ),
    # Means over the targets that count.
    "ignored targets": Meaning((X, GAPPED), counted_entropy),
    "class weights": Meaning(XY, lambda out, y: mean(entropies(out, y), CLASS_WEIGHTS[y])),
    "class weights and ignored targets": Meaning(
        (X, GAPPED), lambda out, y: mean(entropies(out, y), CLASS_WEIGHTS[y] * counted(y))
    ),
    # Example weights.
    "example weights": Meaning(XYW, lambda out, y, w: mean(entropies(out, y), w)),
    "example and class weights": Meaning(XYW, lambda out, y, w: mean(entropies(out, y), w * CLASS_WEIGHTS[y])),
    "example weights and ignored targets": Meaning(
        (X, GAPPED, EXAMPLE_WEIGHTS), lambda out, y, w: mean(entropies(out, y), w * counted(y))
    ),
    "example weights and probabilities as targets": Meaning(
        (X, PROBABILITIES, EXAMPLE_WEIGHTS), lambda out, y, w: mean(soft_entropies(out, y), w)
    ),
    "squares with example weights": Meaning(XVW, lambda out, y, w: mean(squares(out, y), w)),
    "squares with example weights in a column": Meaning(
        (X, VALUES, EXAMPLE_WEIGHTS[:, None]), lambda out, y, w: mean(squares(out, y), w[:, 0])
    ),
    "one value per example, with weights": Meaning(XVW, lambda out, y, w: mean(fourths(out, y), w)),
    # Sums.
    "sum": Meaning(XY, lambda out, y: entropies(out, y).sum()),
    "sum with example weights": Meaning(XYW, lambda out, y, w: (entropies(out, y) * w).sum()),
    "sum of squares": Meaning(XV, lambda out, y: ((out - y) ** 2).sum()),
    "sum of mean squares": Meaning(XV, lambda out, y: squares(out, y).sum()),
    # One value per example, and means over elements.
    "one value per example": Meaning(XV, lambda out, y: fourths(out, y).mean()),
    "squares": Meaning(XV, lambda out, y: squares(out, y).mean()),
    "binary targets": Meaning((X, BINARY), lambda out, y: binary_entropies(out, y).mean()),
    # Objectives, and functions that are sums.
    "objective": Meaning(NAMED, entropy),
    "objective with values": Meaning(NAMED, entropy, measure_hits),
    "objective of (sum, weight)": Meaning(NAMED_GAPPED, counted_entropy),
    "objective of (sum, weight), a shard's weight 0 and its sum not": Meaning(
        NAMED_GAPPED, lambda out, y: (entropies(out, y) * (counted(y) + 0.1)).sum() / counted(y).sum()
    ),
    "objective of a Sum without a count": Meaning(NAMED, lambda out, y: entropies(out, y).sum()),
    "a function that gives a Sum": Meaning((X, GAPPED), counted_entropy),
    # The model's own loss.
    "an output with a loss": Meaning({"x": X, "labels": LABELS}, entropy),
    "an output with a loss and logits": Meaning(
        {"x": X, "labels": LABELS}, entropy, lambda out, y: {"accuracy": hit(out, y).mean()}
    ),
    # Inputs.
    "inputs by name": Meaning(({"left": X[:, :2], "right": X[:, 2:]}, LABELS), entropy),
    "inputs by position": Meaning(((X[:, :2], X[:, 2:]), LABELS), entropy),
    # Metrics.
    "metrics of classes": Meaning(XY, entropy, measure_traced_classes),
    "metrics of values": Meaning(XV, lambda out, y: squares(out, y).mean(), measure_values),
    "metrics without ignored targets": Meaning((X, GAPPED), counted_entropy, measure_counted),
    "metrics of probabilities": Meaning(
        (X, PROBABILITIES),
        lambda out, y: soft_entropies(out, y).mean(),
        lambda out, y: {
            "accuracy": hit(out, y.argmax(1)).mean(),
            "top5": in_top5(out, y.argmax(1)).mean(),
        },
    ),
    "accuracy of binary targets": Meaning(
        (X, BINARY[:, :1]),
        lambda out, y: binary_entropies(out, y).mean(),
        lambda out, y: {"accuracy": ((out > 0) == (y > 0.5)).mean()},
        NARROW,
    ),
    "accuracy of many binary targets": Meaning(
        (X, BINARY),
        lambda out, y: binary_entropies(out, y).mean(),
        lambda out, y: {"accuracy": ((out > 0) == (y > 0.5)).mean()},
    ),
    "accuracy of a column and a vector of binary targets": Meaning(
        (X, BINARY[:, 0]),
        lambda out, y: binary_entropies(out[:, 0], y).mean(),
        lambda out, y: {"accuracy": ((out[:, 0] > 0) == (y > 0.5)).mean()},
        NARROW,
    ),
}
