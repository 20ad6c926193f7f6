"""Finds out whether a loss of (outputs, targets) is a sum or a mean over the examples, by calling it.

A function does not say how it reduces, but the weight of a shard's loss depends on it. If the examples are split into
two parts a and b, a sum has L(ab) = L(a) + L(b); a mean has L(ab) = the average of L(a) and L(b), weighted by the
numbers of examples.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from lockstep.core.batches import is_array

Criterion = Callable[[Any, Any], float | None]
"""Returns the loss as one number; None if it is not one number, such as a `Sum` with its own divisor."""


_MOST_PARTS = 8
"""The largest number of pairs of examples whose losses are compared, once in a run."""


class Reduction(Enum):
    """Whether a loss is a sum or a mean, and how that is known."""

    MEAN = "mean"  # a mean, or a loss that says itself what it is divided by
    SUM = "sum"
    ASSUMED = "assumed mean"  # neither, or not known: used as a mean over the examples


def judge(criterion: Criterion, outputs: Any, targets: Any, num_examples: int) -> Reduction | None:
    """Returns the reduction of a loss, by comparing its values for two halves of the examples and for all of them.

    Returns None if all values are 0, because then nothing can be concluded. If the criterion raises, or the values fit
    neither a sum nor a mean, returns `Reduction.ASSUMED`. A single example is used as both halves.

    >>> outputs, targets = np.array([1.0, 2.0, 4.0]), np.zeros(3)
    >>> judge(lambda outputs, targets: float(((outputs - targets) ** 2).sum()), outputs, targets, 3)
    <Reduction.SUM: 'sum'>
    >>> judge(lambda outputs, targets: float(((outputs - targets) ** 2).mean()), outputs, targets, 3)
    <Reduction.MEAN: 'mean'>
    """
    try:
        pair = outputs, targets
        if num_examples == 1:
            pair, num_examples = _cut(pair, 1, [0, 0]), 2
        half = num_examples // 2
        whole = criterion(*_cut(pair, num_examples, slice(None)))
        if whole is None:
            return Reduction.MEAN
        left = criterion(*_cut(pair, num_examples, slice(0, half)))
        right = criterion(*_cut(pair, num_examples, slice(half, None)))
    except Exception:  # the step that follows raises the same error, with the shard's number
        return Reduction.ASSUMED
    if left is None or right is None:
        return Reduction.ASSUMED
    if not (whole or left or right):
        return None
    tolerance = _choose_tolerance(outputs) * (abs(left) + abs(right))
    share = half / num_examples
    is_sum = math.isclose(whole, left + right, rel_tol=0, abs_tol=tolerance)
    is_mean = math.isclose(whole, share * left + (1 - share) * right, rel_tol=0, abs_tol=tolerance)
    if is_sum == is_mean:  # both are true if the losses of the halves cancel
        return Reduction.ASSUMED
    if is_sum:
        return Reduction.SUM
    return Reduction.MEAN if _is_mean_of_extremes(criterion, pair, num_examples) else Reduction.ASSUMED


def _is_mean_of_extremes(criterion: Criterion, pair: Any, num_examples: int) -> bool:
    """Returns whether the loss is also a mean over the two pairs of examples whose losses differ most.

    The halves of a large shard have nearly the same loss, and then the root of a mean (as in RMSE) is nearly equal to
    the mean of the roots.
    """
    starts = range(0, min(num_examples, 2 * _MOST_PARTS) - 1, 2)
    try:
        losses = [criterion(*_cut(pair, num_examples, slice(start, start + 2))) for start in starts]
        numbers = [(loss, start) for loss, start in zip(losses, starts, strict=True) if loss is not None]
        (least, low), (most, high) = min(numbers), max(numbers)
        both = criterion(*_cut(pair, num_examples, [low, low + 1, high, high + 1]))
    except Exception:  # the loss cannot be computed for so few examples
        return False
    tolerance = _choose_tolerance(pair[0]) * (abs(least) + abs(most))
    return both is not None and math.isclose(both, (least + most) / 2, rel_tol=0, abs_tol=tolerance)


def _cut(tree: Any, num_examples: int, where: Any) -> Any:
    """Selects examples from every array and list of a pytree; raises if one does not have `num_examples` rows."""
    if isinstance(tree, Mapping):
        return {key: _cut(value, num_examples, where) for key, value in tree.items()}
    if isinstance(tree, tuple):
        values = [_cut(value, num_examples, where) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list) and tree and all(map(is_array, tree)):
        return [_cut(value, num_examples, where) for value in tree]
    if isinstance(tree, list):
        _check_rows(tree, num_examples)
        return tree[where] if isinstance(where, slice) else [tree[index] for index in where]
    if is_array(tree):
        _check_rows(tree, num_examples)
        return tree[where]
    return tree


def _check_rows(rows: Any, num_examples: int) -> None:
    if len(rows) != num_examples:
        raise ValueError(f"an array or list has {len(rows)} rows, but the shard has {num_examples} examples")


def _choose_tolerance(outputs: Any) -> float:
    """Returns the relative difference that is allowed between a loss and the value computed from its parts.

    It is much larger than the rounding error of one number, because long sums of both signs lose several digits.
    """
    values = [outputs]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, tuple | list):
            values += value
        elif isinstance(value, np.ndarray) and value.dtype == np.float16:
            return 4e-3
    return 3e-4
