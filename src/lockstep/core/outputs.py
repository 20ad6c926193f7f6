"""Outputs and targets of the shards, on their way to metric objects in the controlling process.

A metric such as AUROC is no sum over shards: it needs all outputs at once. So where
`wrap` was given a metric object with state, every process keeps what its shards gave,
until the controlling process asks for it and joins it in the order of the shards.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.core.batches import describe, join, leaves, transform
from lockstep.errors import BatchError, ModelError

if TYPE_CHECKING:
    from lockstep.backends.base import Work

LIMIT = 2**28  # bytes of outputs and targets a batch: what a step may move between processes for a metric

Pair = tuple[Any, Any]  # outputs and targets


class ShardOutputs:
    """The outputs and targets of the shards that this process computed last.

    `to_numpy` turns one of the framework's arrays into numpy, `to_array` does the opposite,
    in the CPU's memory, and `to_cpu` brings a metric object there.

    >>> from types import SimpleNamespace
    >>> kept = ShardOutputs(True, np.asarray)
    >>> kept.keep(SimpleNamespace(num_examples=4), 1, np.ones(2), np.zeros(2), examples=2)
    >>> kept.take()
    {1: (array([1., 1.]), array([0., 0.]))}
    >>> kept.take()
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
        """Keeps one shard's, in the place of what an earlier work left; refuses a batch too large to gather.

        It is called before the step's commit, so a batch that is refused has changed nothing.
        """
        if not self.wanted:
            return
        if work is not self._work:  # a step that failed may have left some of its shards
            self._work, self._kept = work, {}
        if outputs is None or targets is None:
            raise ModelError(
                "A metric object needs outputs and targets, and this loss names neither. Use a loss of (outputs, "
                "targets), or leave the metric object out and let the objective return its own values: "
                "return loss, {'name': value}."
            )
        size = sum(map(_num_bytes, leaves((outputs, targets)))) * work.num_examples // examples
        if size > LIMIT:
            raise BatchError(
                f"A metric object gets at most {LIMIT >> 20} MiB of outputs and targets a batch. Got {size >> 20} MiB "
                f"for a batch of {work.num_examples} ({describe(outputs)} and {describe(targets)} in a shard of "
                f"{examples}). "
                "Use a lockstep.Metric, whose sums are made where the outputs are; or a smaller batch."
            )
        self._kept[shard] = outputs, targets

    def take(self) -> dict[int, Pair]:
        """What was kept, as numpy, and forgets it."""
        kept, self._kept, self._work = self._kept, {}, None
        return {shard: transform(pair, self._leaf) for shard, pair in kept.items()}

    def _leaf(self, value: Any) -> Any:
        return [self._leaf(each) for each in value] if isinstance(value, list) else self.to_numpy(value)


def join_shards(shards: Mapping[int, Pair]) -> Pair:
    """The outputs and targets of the whole batch, put end to end in the order of the shards.

    >>> join_shards({1: (np.ones(1), np.array([3])), 0: (np.zeros(2), np.array([1, 2]))})
    (array([0., 0., 1.]), array([1, 2, 3]))
    """
    pairs = [shards[shard] for shard in sorted(shards)]
    try:
        pair: Pair = join(pairs, np.concatenate)
    except Exception as error:
        raise ModelError(
            "A metric object needs outputs and targets that are arrays, or tuples, lists and dicts of them, with one "
            f"row per example. Got {' and '.join(map(describe, pairs[0]))} in the first shard, and joining the shards "
            f"fails: {error}. Return such outputs, or use a lockstep.Metric."
        ) from error
    return pair


def _num_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return int(prod(value.shape)) * np.dtype(value.dtype).itemsize if _has_dtype(value) else 0


def _has_dtype(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
