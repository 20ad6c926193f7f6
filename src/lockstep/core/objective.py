"""Objectives: losses that are functions of (model, batch) instead of (outputs, targets)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from lockstep.core.arguments import show
from lockstep.core.batches import describe
from lockstep.errors import ModelError


class Sum(NamedTuple):
    """The loss of one shard as a sum, and the count by which the sum over all shards is divided.

    The loss of a batch is the sum of all totals divided by the sum of all counts, for example the number of tokens that
    are not masked. A count may be a number or a scalar array. Without a count the loss is not divided, as with
    `reduction="sum"`. A `Sum` is a named tuple, so that `jax.jit` and `tf.function` can return it.

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


class Carried(NamedTuple):
    """The loss of one shard, and state that the next batch starts from, such as a recurrent network's hidden state.

    `loss` is a mean, one loss per example, or a `Sum`. `state` is an array, or a tuple or dict of arrays, with one
    row for each example of the shard on axis 0. `trainer.step(batch).carried` is the state of the whole batch in the
    order of its examples. No gradient flows through it into the batch before.

    >>> @objective
    ... def loss(model, batch):
    ...     outputs, hidden = model(batch["x"], batch["hidden"])
    ...     return Carried(((outputs - batch["y"]) ** 2).mean(), hidden)
    """

    loss: Any
    state: Any


class ObjectiveResult(NamedTuple):
    """What an objective has returned for one shard: the loss, metrics by name, and the carried state or None."""

    loss: Any
    values: Mapping[str, Any]
    carried: Any = None


@dataclass(frozen=True)
class Objective:
    """A loss that is a function `(model, batch)`, called with one shard at a time."""

    function: Callable[[Any, Any], Any]
    gives_sum: bool = field(default=False, init=False, compare=False)  # whether the last call returned a `Sum`

    def __call__(self, model: Any, batch: Any) -> Any:
        """Returns what the function returns for one shard."""
        return self.function(model, batch)

    def compute(self, model: Any, batch: Any, function: Callable[[Any, Any], Any] | None = None) -> ObjectiveResult:
        """Returns the loss, metrics and state of one shard; a pair (total, count) is returned as a `Sum`.

        `function` is a compiled form of the objective's own.
        """
        loss = (function or self.function)(model, batch)
        values: Mapping[str, Any] = {}
        carried = None
        if (
            not isinstance(loss, Carried)
            and isinstance(loss, tuple)
            and len(loss) == 2
            and isinstance(loss[1], Mapping)
        ):
            loss, values = loss
        if isinstance(loss, Carried):
            loss, carried = loss
            if carried is None or (isinstance(loss, tuple) and not isinstance(loss, Sum)):
                raise ModelError(
                    f"lockstep.Carried takes a loss and its state. Got {describe(Carried(loss, carried))}. Return "
                    "lockstep.Carried(loss, state), or (lockstep.Carried(loss, state), {name: value}) to report "
                    "metrics as well. If the loss has a denominator of its own, give it as lockstep.Sum(total, count)."
                )
        loss = read_sum(loss)
        object.__setattr__(self, "gives_sum", isinstance(loss, Sum))
        return ObjectiveResult(loss, values, carried)


def read_sum(loss: Any) -> Any:
    """Returns a pair (total, count) as a `Sum`, and any other loss unchanged; raises if the total is not one number."""
    if isinstance(loss, Carried):
        raise ModelError(
            "Only an objective can return lockstep.Carried, because it gets the batch with the state in it. A loss of "
            "(outputs, targets) gets no state to start from. Write @lockstep.objective above a function of (model, "
            "batch)."
        )
    if not isinstance(loss, Sum) and not (isinstance(loss, tuple) and len(loss) == 2 and loss[1] is not None):
        return loss
    pair = Sum(*loss)
    shape = getattr(pair.total, "shape", None)
    if shape is None or prod(shape) != 1:
        raise ModelError(
            f"The total of a lockstep.Sum must be an array of one number. Got {describe(pair.total)}. Compute the "
            "total from the model's outputs, for example as losses.sum()."
        )
    return pair


def objective(function: Callable[[Any, Any], Any]) -> Objective:
    """Returns an objective, which can be given to `wrap` as the loss, from a function of (model, batch).

    The function is called with one shard of a batch at a time. It returns the mean loss of the shard's examples, or one
    loss per example, or `Sum(total, count)` for a loss with its own denominator, or `Sum(total)` for a sum that is not
    divided. A pair `(total, count)` means the same as a `Sum`. To give state to the next batch it returns
    `Carried(loss, state)` in the place of the loss. To log metrics it returns `(loss, {name: value})`.
    Raises `ModelError` if `function` is not callable.

    >>> @objective
    ... def loss(model, batch):
    ...     return (model(batch["x"]) - batch["y"]) ** 2
    >>> loss(lambda x: 2 * x, {"x": 3, "y": 5})
    1
    """
    if not callable(function):
        raise ModelError(
            f"An objective must be a function of (model, batch). Got {show(function)}. Write @lockstep.objective "
            "above such a function."
        )
    return Objective(function)
