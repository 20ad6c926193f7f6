"""Stores the outputs and targets of the shards for the metric objects in the controller.

A metric such as AUROC is not a sum over shards; it needs the outputs of the whole batch. So if `wrap` was given a
metric object, every process stores the outputs of its shards until the controller asks for them and concatenates them
in the order of the shards.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from lockstep.core.batches import describe, is_array, join, leaves, transform
from lockstep.core.types import Work
from lockstep.errors import BatchError, ModelError

LIMIT = 2**28  # the most bytes of outputs and targets of a batch that a step may send between processes

Pair = tuple[Any, Any]  # (outputs, targets)


class ShardOutputs:
    """Stores the outputs and targets of the shards of the last batch that this process has computed.

    `to_numpy` copies a framework's array to a numpy array, `to_array` copies a numpy array to a framework's array on
    the CPU, and `to_cpu` moves a metric object to the CPU.

    >>> from types import SimpleNamespace
    >>> kept = ShardOutputs(True, np.asarray)
    >>> kept.keep(SimpleNamespace(num_examples=4), 1, np.ones(2), np.zeros(2), examples=2)
    >>> kept.read()
    {1: (array([1., 1.]), array([0., 0.]))}
    >>> kept.clear()
    >>> kept.read()
    {}
    """

    def __init__(
        self,
        wanted: bool,
        to_numpy: Callable[[Any], Any],
        to_array: Callable[[Any], Any] = np.array,
        to_cpu: Callable[[Any], Any] = lambda metric: metric,
    ) -> None:
        self.wanted = wanted
        self.to_numpy = to_numpy
        self.to_array = to_array
        self.to_cpu = to_cpu
        self._work: Any = None
        self._kept: dict[int, Pair] = {}

    def keep(self, work: "Work", shard: int, outputs: Any, targets: Any, examples: int) -> None:
        """Stores the outputs and targets of one shard, and drops what is stored of earlier batches.

        Raises BatchError if the outputs of the batch would be too large. This is called before the step is committed,
        so the model is then unchanged.
        """
        if not self.wanted:
            return
        if work is not self._work:  # a step that failed may have stored some of its shards
            self._work, self._kept = work, {}
        if outputs is None or targets is None:
            raise ModelError(
                "A metric object needs outputs and targets, but this loss is an objective of (model, batch), which has "
                "neither. Use a loss of (outputs, targets), or leave the metric object out and return the metric from "
                "the objective: return loss, {'name': value}."
            )
        size = sum(map(_num_bytes, leaves((outputs, targets)))) * work.num_examples // examples
        if size > LIMIT:
            raise BatchError(
                f"The outputs and targets of this batch of {work.num_examples} examples have {size >> 20} MiB "
                f"({describe(outputs)} and {describe(targets)} in a shard of {examples}), and a metric object can get "
                f"at most {LIMIT >> 20} MiB per batch. Use a lockstep.Metric, whose sums are computed on the devices, "
                "or a smaller batch."
            )
        self._kept[shard] = outputs, targets

    def read(self) -> dict[int, Pair]:
        """Returns the stored outputs and targets by shard, as numpy; they stay until the next batch."""
        return {shard: transform(pair, self._leaf) for shard, pair in self._kept.items()}

    def clear(self) -> None:
        """Drops what is stored."""
        self._work, self._kept = None, {}

    def _leaf(self, value: Any) -> Any:
        return [self._leaf(each) for each in value] if isinstance(value, list) else self.to_numpy(value)


def join_shards(shards: Mapping[int, Pair]) -> Pair:
    """Returns the outputs and targets of the whole batch, concatenated in the order of the shards.

    >>> join_shards({1: (np.ones(1), np.array([3])), 0: (np.zeros(2), np.array([1, 2]))})
    (array([0., 0., 1.]), array([1, 2, 3]))
    """
    pairs = [shards[shard] for shard in sorted(shards)]
    try:
        pair: Pair = join(pairs, np.concatenate)
    except Exception as error:
        raise ModelError(
            f"The outputs and targets of the shards cannot be concatenated for the metric objects: {error}. The first "
            f"shard has {' and '.join(map(describe, pairs[0]))}. Return arrays with one row per example, or tuples, "
            "lists and dicts of such arrays, or use a lockstep.Metric."
        ) from error
    return pair


def _num_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return int(prod(value.shape)) * np.dtype(value.dtype).itemsize if _has_dtype(value) else 0


def _has_dtype(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def check_rows(outputs: Any, num_examples: int) -> None:
    """Raises BatchError if the model's outputs are not a pytree of arrays with one row per example."""
    if isinstance(outputs, Mapping):
        values = list(outputs.values())
    elif isinstance(outputs, tuple | list):
        values = list(outputs)
    elif is_array(outputs) and len(outputs) == num_examples:
        return
    else:
        raise BatchError(
            f"The model returned {describe(outputs)} for {num_examples} examples. "
            "Return arrays, or tuples, lists and dicts of them, with one row per example on axis 0."
        )
    for value in values:
        check_rows(value, num_examples)
