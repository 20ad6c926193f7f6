"""Whether a loss of (outputs, targets) is a sum over the examples or their mean, found out from its values.

A function says nothing of its reduction, and a shard's part of the batch's loss depends on it. Of one and the same
outputs a sum gives L(a) + L(b) = L(ab), and a mean gives their average weighted by the numbers of examples.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from lockstep.core.batches import is_array

Criterion = Callable[[Any, Any], float | None]
"""The loss of outputs and targets as one number; None if its form tells how the examples count."""


_MOST_PARTS = 8
"""Pairs of examples whose losses are compared: with the halves a dozen calls of the loss, once in a run."""


class Reduction(Enum):
    """How a loss is taken in a run."""

    MEAN = "mean"  # or the loss itself says what it divides by
    SUM = "sum"
    ASSUMED = "assumed mean"  # it is neither, or cannot be judged: taken as the mean over the examples


def judge(criterion: Criterion, outputs: Any, targets: Any, num_examples: int) -> Reduction | None:
    """Compares the losses of two parts of the examples with that of both; None if the loss is 0, which tells nothing.

    One example is taken twice. Whatever the criterion raises for a part, the loss cannot be judged by its parts.

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
    except Exception:  # the step that follows raises what is wrong with the batch, with the shard's number
        return Reduction.ASSUMED
    if left is None or right is None:
        return Reduction.ASSUMED
    if not (whole or left or right):
        return None
    tolerance = _tolerance(outputs) * (abs(left) + abs(right))
    share = half / num_examples
    is_sum = math.isclose(whole, left + right, rel_tol=0, abs_tol=tolerance)
    is_mean = math.isclose(whole, share * left + (1 - share) * right, rel_tol=0, abs_tol=tolerance)
    if is_sum == is_mean:  # both are true of parts that cancel
        return Reduction.ASSUMED
    if is_sum:
        return Reduction.SUM
    return Reduction.MEAN if _is_mean_of_extremes(criterion, pair, num_examples) else Reduction.ASSUMED


def _is_mean_of_extremes(criterion: Criterion, pair: Any, num_examples: int) -> bool:
    """Whether the loss is the mean also over the two parts, of two examples each, that differ most.

    The halves of a large shard have nearly the same loss, and then a root of a mean is nearly the mean of roots.
    """
    starts = range(0, min(num_examples, 2 * _MOST_PARTS) - 1, 2)
    try:
        losses = [criterion(*_cut(pair, num_examples, slice(start, start + 2))) for start in starts]
        known = [(loss, start) for loss, start in zip(losses, starts, strict=True) if loss is not None]
        (least, low), (most, high) = min(known), max(known)
        both = criterion(*_cut(pair, num_examples, [low, low + 1, high, high + 1]))
    except Exception:  # of so few examples the loss cannot be taken
        return False
    tolerance = _tolerance(pair[0]) * (abs(least) + abs(most))
    return both is not None and math.isclose(both, (least + most) / 2, rel_tol=0, abs_tol=tolerance)


def _cut(nest: Any, num_examples: int, where: Any) -> Any:
    """The examples `where` says of every array of a nest; raises if one has another number of rows."""
    if isinstance(nest, Mapping):
        return {key: _cut(value, num_examples, where) for key, value in nest.items()}
    if isinstance(nest, tuple):
        values = [_cut(value, num_examples, where) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)
    if isinstance(nest, list) and nest and all(map(is_array, nest)):
        return [_cut(value, num_examples, where) for value in nest]
    if isinstance(nest, list):
        _check_rows(nest, num_examples)
        return nest[where] if isinstance(where, slice) else [nest[index] for index in where]
    if is_array(nest):
        _check_rows(nest, num_examples)
        return nest[where]
    return nest


def _check_rows(rows: Any, num_examples: int) -> None:
    if len(rows) != num_examples:
        raise ValueError(f"{len(rows)} rows for {num_examples} examples")


def _tolerance(outputs: Any) -> float:
    """By how much, relative to itself, a loss of such outputs may differ from what its parts add up to.

    Far more than the last digit: sums over many elements, and those of both signs, lose several.
    """
    nests = [outputs]
    while nests:
        nest = nests.pop()
        if isinstance(nest, Mapping):
            nests += nest.values()
        elif isinstance(nest, tuple | list):
            nests += nest
        elif isinstance(nest, np.ndarray) and nest.dtype == np.float16:
            return 4e-3
    return 3e-4
