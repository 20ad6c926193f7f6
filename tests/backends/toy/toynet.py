"""A framework that Lockstep does not know: arrays with gradients, a dense model, two losses and an optimizer."""

from dataclasses import dataclass, field

import numpy as np

__version__ = "1.0"
generator = np.random.default_rng(0)  # of the whole process; dropout draws from it


class Array:
    """Numbers, and for each array they were computed from a function that gives that array's part of the gradient."""

    __array_ufunc__ = None  # so that `numpy array * Array` asks Array

    def __init__(self, values, sources=()):
        self.values = np.asarray(values)
        self.gradient = None
        self.sources = sources

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, where):
        return Array(self.values[where])

    def __add__(self, other):
        other = as_array(other)
        return Array(self.values + other.values, [(self, lambda up: up), (other, lambda up: up)])

    def __mul__(self, other):
        other = as_array(other)
        parts = [(self, lambda up: up * other.values), (other, lambda up: up * self.values)]
        return Array(self.values * other.values, parts)

    def __matmul__(self, other):
        parts = [(self, lambda up: up @ other.values.T), (other, lambda up: self.values.T @ up)]
        return Array(self.values @ other.values, parts)

    def __truediv__(self, number):
        return Array(self.values / number, [(self, lambda up: up / number)])

    def __neg__(self):
        return Array(-self.values, [(self, lambda up: -up)])

    def __sub__(self, other):
        return self + -as_array(other)

    def __rsub__(self, other):
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __gt__(self, other):
        return Array(self.values > as_array(other).values)

    def __abs__(self):
        return Array(abs(self.values))

    def reshape(self, shape):
        return Array(self.values.reshape(shape), [(self, lambda up: up.reshape(self.shape))])

    def sum(self):
        return Array(self.values.sum(), [(self, lambda up: np.broadcast_to(up, self.shape))])

    def mean(self):
        return self.sum() / self.values.size

    def backward(self):
        """Adds to the `gradient` of every array that this number was computed from."""
        order, seen = [], set()

        def visit(array):
            if id(array) not in seen:
                seen.add(id(array))
                for source, _ in array.sources:
                    visit(source)
                order.append(array)

        visit(self)
        self.gradient = np.ones(self.shape, self.dtype)
        for array in reversed(order):
            for source, pull_back in array.sources:
                part = pull_back(array.gradient)
                part = part.sum(tuple(range(part.ndim - source.values.ndim)))  # undo broadcasting
                source.gradient = part if source.gradient is None else source.gradient + part


def as_array(values):
    return values if isinstance(values, Array) else Array(values)


class Dense:
    """Dense layers of the given weights with ReLU between them, and dropout before the last."""

    def __init__(self, weights, dropout=0.0):
        self.parameters = {name: Array(np.array(value)) for name, value in weights.items()}
        self.dropout = dropout
        self.training = False

    def __call__(self, x):
        depth = len(self.parameters) // 2
        for index in range(depth):
            if index:
                x = x * (x.values > 0)
            if self.training and self.dropout and index == depth - 1:
                x = x * (generator.random(x.shape) >= self.dropout) / (1 - self.dropout)
            x = x @ self.parameters[f"{index}.weight"] + self.parameters[f"{index}.bias"]
        return x


@dataclass
class CrossEntropy:
    """The cross-entropy of logits and labels; the label `ignored` does not count."""

    ignored: int | None = None
    reduction: str = "mean"

    def count(self, targets):
        """1 for each label that counts, else 0."""
        return Array((targets.values != self.ignored).astype(float))

    def each(self, outputs, targets):
        counted = self.count(targets).values
        rows, index = np.arange(len(counted)), np.where(counted, targets.values, 0)
        shifted = outputs.values - outputs.values.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

        def pull_back(up):
            gradient = np.exp(logs)
            gradient[rows, index] -= 1
            return gradient * (counted * up)[:, None]

        return Array(-logs[rows, index] * counted, [(outputs, pull_back)])

    def __call__(self, outputs, targets):
        total = self.each(outputs, targets).sum()
        return total if self.reduction == "sum" else total / self.count(targets).values.sum()


@dataclass
class SquaredError:
    """The squared error, averaged over an example's outputs."""

    reduction: str = "mean"

    def each(self, outputs, targets):
        errors = outputs - targets
        factor = 2 / errors.values[0].size
        return Array((errors.values**2).mean(1), [(errors, lambda up: factor * errors.values * up[:, None])])

    def __call__(self, outputs, targets):
        losses = self.each(outputs, targets)
        return losses.sum() if self.reduction == "sum" else losses.mean()


@dataclass
class SGD:
    """Gradient descent with momentum over a model's parameters."""

    parameters: dict
    lr: float
    momentum: float = 0.0
    velocities: dict = field(default_factory=dict)

    def step(self):
        """Makes one update in place, from every parameter's `gradient`."""
        for name, parameter in self.parameters.items():
            change = parameter.gradient
            if self.momentum:
                change = change + self.velocities.get(name, 0) * self.momentum
                self.velocities[name] = change
            parameter.values -= self.lr * change
