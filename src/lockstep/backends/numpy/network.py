"""The network: dense layers, an optimizer and two losses, with gradients written by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.batches import describe
from lockstep.core.target_kind import check_labels
from lockstep.errors import BatchError, ModelError

Floats = NDArray[Any]


class Dense:
    """A network of dense layers with ReLU between them and dropout before the last.

    >>> Dense([4, 8, 3], seed=0)(np.zeros((2, 4))).shape
    (2, 3)
    """

    def __init__(self, sizes: Sequence[int], seed: int, dtype: str = "float64", dropout: float = 0.0) -> None:
        generator = np.random.Generator(np.random.PCG64(seed))
        self.dropout = dropout
        self.parameters: dict[str, Floats] = {}
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = generator.standard_normal((inputs, outputs)) / np.sqrt(inputs)
            self.parameters[f"{index}.weight"] = weight.astype(dtype)
            self.parameters[f"{index}.bias"] = np.zeros(outputs, dtype)

    def __call__(self, x: Floats) -> Floats:
        """The outputs for a batch of inputs, without dropout."""
        return self.forward(x, None)[-1]

    def forward(self, x: Floats, generator: np.random.Generator | None) -> list[Floats]:
        """The values before each layer and the outputs; with a generator, dropout draws from it."""
        values = [x]
        depth = len(self.parameters) // 2
        for index in range(depth):
            if index:
                values[-1] = np.maximum(values[-1], 0)
            if index == depth - 1 and generator is not None and self.dropout:
                keep = generator.random(values[-1].shape) >= self.dropout
                values[-1] = values[-1] * keep.astype(values[-1].dtype) / (1 - self.dropout)
            values.append(values[-1] @ self.parameters[f"{index}.weight"] + self.parameters[f"{index}.bias"])
        return values

    def backward(self, values: list[Floats], slope: Floats) -> dict[str, Floats]:
        """The gradient of every parameter, given that of the outputs."""
        gradients: dict[str, Floats] = {}
        depth = len(self.parameters) // 2
        for index in reversed(range(depth)):
            gradients[f"{index}.weight"] = values[index].T @ slope
            gradients[f"{index}.bias"] = slope.sum(0)
            slope = slope @ self.parameters[f"{index}.weight"].T
            if index == depth - 1 and self.dropout:
                slope = slope / (1 - self.dropout)
            slope = np.where(values[index] > 0, slope, 0)
        return gradients


@dataclass
class SGD:
    """Gradient descent with momentum.

    >>> SGD(0.1).momentum
    0.0
    """

    lr: float
    momentum: float = 0.0
    slots: dict[str, Floats] = field(default_factory=dict)

    def step(self, parameters: dict[str, Floats], gradients: Mapping[str, Floats]) -> None:
        """One update, in place."""
        for name, gradient in gradients.items():
            if self.momentum:
                before = self.slots.get(name)
                self.slots[name] = gradient.copy() if before is None else before * self.momentum + gradient
                gradient = self.slots[name]
            parameters[name] -= np.asarray(self.lr, gradient.dtype) * gradient


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits and class indices.

    The mean divides by the weights of the targets that are not ignored.
    """

    ignore_index: int = -100
    weights: tuple[float, ...] | None = None
    reduction: str = "mean"

    def __call__(self, outputs: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Per example: the loss, what it weighs, and the slope of the loss."""
        if self.weights is not None and len(self.weights) != outputs.shape[1]:
            raise ModelError(
                f"Class weights are one for each class. Got {len(self.weights)} for {outputs.shape[1]} classes. "
                "Give one for each of the model's outputs."
            )
        if not np.issubdtype(targets.dtype, np.integer) or targets.shape != outputs.shape[:1]:
            raise BatchError(
                f"Labels are integers, one for each row of the outputs. Got {targets.dtype} of shape {targets.shape} "
                f"for outputs of shape {outputs.shape}. Use targets.astype(int), one for each example."
            )
        check_labels(targets, outputs.shape[1], self.ignore_index)
        shifted = outputs - outputs.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        rows, counted = np.arange(len(targets)), targets != self.ignore_index
        index = np.where(counted, targets, 0)
        weights = counted * (np.ones(outputs.shape[1]) if self.weights is None else np.asarray(self.weights))[index]
        slopes = np.exp(logs)
        slopes[rows, index] -= 1
        return -logs[rows, index] * weights, weights, slopes * weights[:, None]


@dataclass(frozen=True)
class SquaredError:
    """The mean over an example's outputs of the squared error."""

    reduction: str = "mean"

    def __call__(self, outputs: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Per example: the loss, what it weighs, and the slope of the loss."""
        errors = outputs - targets
        return (errors**2).mean(1), np.ones(len(errors)), 2 * errors / errors.shape[1]


def read_array(value: Any) -> Floats:
    """A fresh copy as one array."""
    try:
        array = np.array(value)
    except ValueError as error:
        raise BatchError(f"numpy's model takes one array of inputs. Got {describe(value)}: {error}.") from None
    if array.dtype == object or array.dtype.kind in "USc":
        raise BatchError(f"numpy's model takes arrays of real numbers. Got {array.dtype}. Use .astype(float).")
    return array


LOSSES: dict[str, Any] = {"cross_entropy": CrossEntropy(), "mse": SquaredError()}
