"""Objectives: a loss of the user's own, for what (inputs, targets) cannot say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from lockstep.core.arguments import show
from lockstep.core.batches import describe
from lockstep.errors import ModelError


class Sum(NamedTuple):
    """A loss that is a sum over a shard, and the count by which the sum over all shards is divided, once.

    Without a count nothing is divided: the loss of a batch is the sum of its shards' totals, and `reduction="sum"` of
    an ordinary loop. The count may be a number or a scalar: masked tokens, examples that matter. A named tuple, so
    that `jax.jit` and `tf.function` can return it.

    >>> @objective
    ... def masked_error(model, batch):
    ...     errors = (model(batch["x"]) - batch["y"]) ** 2 * batch["mask"]
    ...     return Sum(errors.sum(), batch["mask"].sum())
    >>> import numpy as np
    >>> total, count = masked_error(lambda x: 2 * x, {"x": np.ones(3), "y": np.zeros(3), "mask": np.array([1, 0, 1])})
    >>> int(total), int(count)
    (8, 2)
    """

    total: Any
    count: Any = None


@dataclass(frozen=True)
class Objective:
    """A function `(model, batch)` that gives the loss of one shard."""

    function: Callable[[Any, Any], Any]
    gives_sum: bool = field(default=False, init=False, compare=False)  # whether it has returned one in this process

    def __call__(self, model: Any, batch: Any) -> Any:
        """What the function gives for this shard."""
        return self.function(model, batch)

    def compute(self, model: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        """The loss of this shard, a `Sum` where a pair was returned, and the metrics by name."""
        loss = self.function(model, batch)
        values: Mapping[str, Any] = {}
        if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Mapping):
            loss, values = loss
        loss = read_sum(loss)
        object.__setattr__(self, "gives_sum", isinstance(loss, Sum))
        return loss, values


def read_sum(loss: Any) -> Any:
    """A plain pair (total, count) as a `Sum`; anything else as it is. Raises if a total is not one number."""
    if not isinstance(loss, Sum) and not (isinstance(loss, tuple) and len(loss) == 2 and loss[1] is not None):
        return loss
    found = Sum(*loss)
    shape = getattr(found.total, "shape", None)
    if shape is None or prod(shape) != 1:
        raise ModelError(
            f"The total of a lockstep.Sum is an array of one number. Got {describe(found.total)}. "
            "Compute it from the model's outputs, and give its sum: losses.sum()."
        )
    return found


def objective(function: Callable[[Any, Any], Any]) -> Objective:
    """Marks `function(model, batch)` as the loss itself; give it to `wrap` in the place of a loss.

    It sees one shard at a time and returns the mean loss of the shard's examples, one loss
    per example, `(loss, {name: value})`, or `Sum(total, count)` for a loss with a denominator
    of its own; `Sum(total)` is a sum that is not divided. A plain pair `(total, count)` means
    the same as `Sum`.

    >>> @objective
    ... def loss(model, batch):
    ...     return (model(batch["x"]) - batch["y"]) ** 2
    >>> loss(lambda x: 2 * x, {"x": 3, "y": 5})
    1
    """
    if not callable(function):
        raise ModelError(
            f"An objective is a function of (model, batch). Got {show(function)}. Write @lockstep.objective above one."
        )
    return Objective(function)
