"""A network of dense layers, an optimizer and two losses, with gradients written by hand."""

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
        rng = np.random.Generator(np.random.PCG64(seed))
        self.dropout = dropout
        self.parameters: dict[str, Floats] = {}
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
            self.parameters[f"{index}.weight"] = weight.astype(dtype)
            self.parameters[f"{index}.bias"] = np.zeros(outputs, dtype)

    def __call__(self, x: Floats) -> Floats:
        """Returns the outputs for a batch of inputs, without dropout."""
        return self.forward(x, None)[-1]

    def forward(self, x: Floats, rng: np.random.Generator | None) -> list[Floats]:
        """Returns the inputs of each layer and the outputs; dropout draws from `rng`, and is off if `rng` is None."""
        values = [x]
        depth = len(self.parameters) // 2
        for index in range(depth):
            if index:
                values[-1] = np.maximum(values[-1], 0)
            if index == depth - 1 and rng is not None and self.dropout:
                keep = rng.random(values[-1].shape) >= self.dropout
                values[-1] = values[-1] * keep.astype(values[-1].dtype) / (1 - self.dropout)
            values.append(values[-1] @ self.parameters[f"{index}.weight"] + self.parameters[f"{index}.bias"])
        return values

    def backward(self, values: list[Floats], output_gradient: Floats) -> dict[str, Floats]:
        """Returns the gradient of every parameter from the gradient of the outputs and the values of `forward`."""
        gradients: dict[str, Floats] = {}
        depth = len(self.parameters) // 2
        for index in reversed(range(depth)):
            gradients[f"{index}.weight"] = values[index].T @ output_gradient
            gradients[f"{index}.bias"] = output_gradient.sum(0)
            output_gradient = output_gradient @ self.parameters[f"{index}.weight"].T
            if index == depth - 1 and self.dropout:
                output_gradient = output_gradient / (1 - self.dropout)
            output_gradient = np.where(values[index] > 0, output_gradient, 0)
        return gradients


@dataclass
class SGD:
    """Gradient descent with momentum.

    >>> SGD(0.1).momentum
    0.0
    """

    lr: float
    momentum: float = 0.0
    velocities: dict[str, Floats] = field(default_factory=dict)

    def step(self, parameters: dict[str, Floats], gradients: Mapping[str, Floats]) -> None:
        """Updates the parameters in place with one step."""
        for name, gradient in gradients.items():
            if self.momentum:
                before = self.velocities.get(name)
                self.velocities[name] = gradient.copy() if before is None else before * self.momentum + gradient
                gradient = self.velocities[name]
            parameters[name] -= np.asarray(self.lr, gradient.dtype) * gradient


@dataclass(frozen=True)
class DenseCrossEntropy:
    """Cross-entropy of logits and class indices.

    The mean divides by the sum of the weights of the targets that are not ignored.
    """

    ignore_index: int = -100
    weights: tuple[float, ...] | None = None
    reduction: str = "mean"

    def __call__(self, outputs: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns for each example the loss, its weight, and the gradient of the loss with respect to the outputs."""
        if self.weights is not None and len(self.weights) != outputs.shape[1]:
            raise ModelError(
                f"Class weights need one entry per class. Got {len(self.weights)} weights for {outputs.shape[1]} "
                "classes. Give one weight for each of the model's outputs."
            )
        if not np.issubdtype(targets.dtype, np.integer) or targets.shape != outputs.shape[:1]:
            raise BatchError(
                f"Cross-entropy needs one integer label for each row of the outputs. Got {targets.dtype} of shape "
                f"{targets.shape} for outputs of shape {outputs.shape}. Use targets.astype(int), one per example."
            )
        check_labels(targets, outputs.shape[1], self.ignore_index)
        shifted = outputs - outputs.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        rows, counted = np.arange(len(targets)), targets != self.ignore_index
        index = np.where(counted, targets, 0)
        weights = counted * (np.ones(outputs.shape[1]) if self.weights is None else np.asarray(self.weights))[index]
        output_gradients = np.exp(logs)
        output_gradients[rows, index] -= 1
        return -logs[rows, index] * weights, weights, output_gradients * weights[:, None]


@dataclass(frozen=True)
class DenseSquaredError:
    """The squared error, averaged over an example's outputs."""

    reduction: str = "mean"

    def __call__(self, outputs: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns for each example the loss, its weight, and the gradient of the loss with respect to the outputs."""
        errors = outputs - targets
        return (errors**2).mean(1), np.ones(len(errors)), 2 * errors / errors.shape[1]


def read_array(value: Any) -> Floats:
    """Returns a copy of the value as one array; raises BatchError if it is not an array of real numbers."""
    try:
        array = np.array(value)
    except ValueError as error:
        raise BatchError(
            f"With the numpy backend, inputs, targets and weights must each be one array. Got {describe(value)}: "
            f"{error}. Give rows of equal length, for example as one np.array."
        ) from None
    if array.dtype == object or array.dtype.kind in "USc":
        raise BatchError(
            f"The numpy backend needs arrays of real numbers. Got an array of {array.dtype}. Use .astype(float)."
        )
    return array


LOSSES: dict[str, Any] = {"cross_entropy": DenseCrossEntropy(), "mse": DenseSquaredError()}
