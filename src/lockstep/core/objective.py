"""Objectives: a loss of the user's own, for what (inputs, targets) cannot say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Objective:
    """A function `(model, batch)` that gives the loss of one shard."""

    function: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> Any:
        """What the function gives for this shard."""
        return self.function(model, batch)


def objective(function: Callable[[Any, Any], Any]) -> Objective:
    """Marks `function(model, batch)` as the loss itself; give it to `wrap` in the place of a loss.

    It sees one shard at a time and returns the mean loss of the shard's examples,
    `(loss, {name: value})`, or `(sum, weight)` for a loss with a denominator of
    its own.

    >>> @objective
    ... def loss(model, batch):
    ...     return (model(batch["x"]) - batch["y"]) ** 2
    >>> loss(lambda x: 2 * x, {"x": 3, "y": 5})
    1
    """
    return Objective(function)
