"""What the contract suite asks of a framework: one module in `kits/` with the names of `Kit`.

The suite itself knows no framework. A kit knows its framework and nothing of
Lockstep but the forms that a batch and a loss may take.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

FEATURES, HIDDEN, CLASSES = 6, 7, 8
NUM_EXAMPLES = 61
IGNORED = 2

_generator = np.random.Generator(np.random.PCG64(3))
X = _generator.standard_normal((NUM_EXAMPLES, FEATURES))
LABELS = _generator.integers(0, CLASSES, NUM_EXAMPLES)
LABELS[-5:] = (0, 1, IGNORED, 4, 5)
GAPPED = np.where(np.arange(NUM_EXAMPLES) < 9, IGNORED, LABELS)  # shard 0 of 8 has nothing but ignored targets
VALUES = _generator.standard_normal((NUM_EXAMPLES, CLASSES))
EXAMPLE_WEIGHTS = np.where(np.arange(NUM_EXAMPLES) < 9, 0.0, _generator.uniform(0.1, 3.0, NUM_EXAMPLES))
SIGNS = np.where(np.arange(NUM_EXAMPLES) % 2, -1.0, 1.0)  # cancel in the first shards of 8, and sum to 1
CLASS_WEIGHTS = _generator.uniform(0.2, 2.0, CLASSES)
WEIGHTS = {
    "0.weight": _generator.standard_normal((FEATURES, HIDDEN)),
    "0.bias": _generator.standard_normal(HIDDEN),
    "1.weight": _generator.standard_normal((HIDDEN, CLASSES)),
    "1.bias": _generator.standard_normal(CLASSES),
}


@dataclass(frozen=True)
class Form:
    """One form of batch, loss, weighting or metric, and what plain code of the framework makes of it.

    `by_hand(model, batch)` gives the loss of the whole batch, the gradient by the
    names of `Kit.weights`, and the metrics. Forms of one name mean the same in
    every framework, and their results are compared with numpy's.
    """

    name: str
    batch: Any
    loss: Any
    by_hand: Callable[[Any, Any], tuple[float, dict[str, Any], dict[str, float]]]
    model: Callable[[], Any]
    metrics: Any = ()


class Kit(Protocol):
    """How the suite handles a framework. Everything is in float64."""

    module: Any
    """The backend's module."""
    forms: list[Form]
    """Every form of DESIGN's "A batch" and "A shard weighs" that the framework has."""

    def model(self, weights: Mapping[str, Any], dropout: float = 0.0) -> Any:
        """Dense layers of these weights, ReLU between them, dropout before the last."""

    def sgd(self, model: Any, lr: float, momentum: float = 0.0) -> Any:
        """Gradient descent over all parameters."""

    def cross_entropy(self) -> Any:
        """Cross-entropy that leaves out the target `IGNORED`."""

    def weights(self, model: Any) -> dict[str, Any]:
        """A copy of every parameter in numpy."""

    def nudge(self, model: Any) -> None:
        """Writes to one weight, in place."""

    def set_rate(self, optimizer: Any, lr: float) -> None:
        """Sets the learning rate as a script does."""
