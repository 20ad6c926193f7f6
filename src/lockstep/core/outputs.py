"""Stores what the controller needs from every shard besides sums: outputs for metric objects, and carried state.

A metric such as AUROC needs the outputs of the whole batch. An objective may return state for the next batch, one row
for each example (`lockstep.Carried`). Every process stores both for its shards until the controller asks for them and
concatenates them in the order of the shards.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.core.batches import describe, is_array, join, leaves, transform
from lockstep.core.types import Work
from lockstep.errors import BatchError, ModelError, StateError

if TYPE_CHECKING:
    from lockstep.core.weighing import Term

LIMIT = 2**28  # the most bytes of outputs, targets and carried state of a batch that a step may send between processes


class Outputs(NamedTuple):
    """The outputs, targets and carried state of one shard or of a batch; None for each that is not needed.

    A named tuple, so that a compiled function can return it.
    """

    outputs: Any = None
    targets: Any = None
    carried: Any = None


def select_outputs(term: "Term", wanted: bool) -> Outputs:
    """Returns what to store from a shard's term: the carried state, and if `wanted` the outputs and targets."""
    return Outputs(term.outputs, term.targets, term.carried) if wanted else Outputs(carried=term.carried)


class ShardOutputs:
    """Stores the outputs of the shards of the last batch that this process has computed.

    `wanted` says whether metric objects need outputs and targets; carried state is stored wherever a shard has it.

    `to_numpy` copies a framework's array to a numpy array, `to_array` copies a numpy array to a framework's array on
    the CPU, and `to_cpu` moves a metric object to the CPU.

    >>> kept, work = ShardOutputs(True, np.asarray), Work({}, num_examples=4, num_shards=2, threads=1, seed=0, step=0)
    >>> kept.keep(work, 1, Outputs(np.ones(2), np.zeros(2)), examples=2)
    >>> kept.read()
    {1: Outputs(outputs=array([1., 1.]), targets=array([0., 0.]), carried=None)}
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
        self.refusal = ""  # why state cannot be carried now, as the end of a sentence; empty if it can
        self._work: Callable[[], Work | None] = lambda: None  # a weak reference, because a work has the batch
        self._kept: dict[int, Outputs] = {}

    def keep(self, work: Work, shard: int, found: Outputs, examples: int) -> None:
        """Stores the outputs of one shard, and drops the stored outputs of earlier batches.

        Raises if the outputs of the batch would be too large, or if state cannot be carried. The model is then
        unchanged, because this is called before the step is committed.
        """
        if work is not self._work():  # a step that failed may have stored some of its shards
            self._work, self._kept = weakref.ref(work), {}
        outputs, targets, carried = found
        if self.wanted and (outputs is None or targets is None):
            raise ModelError(
                "A metric object needs outputs and targets, but this loss is an objective of (model, batch), which has "
                "neither. Use a loss of (outputs, targets), or leave the metric object out and return the metric from "
                "the objective: return loss, {'name': value}."
            )
        self._check_carried(carried, shard)
        size = sum(map(_num_bytes, leaves(found))) * work.num_examples // examples
        if size > LIMIT:
            raise BatchError(
                f"The outputs and targets of this batch of {work.num_examples} examples have {size >> 20} MiB "
                f"({describe(outputs)} and {describe(targets)} in a shard of {examples}), and a metric object can get "
                f"at most {LIMIT >> 20} MiB per batch. Use a lockstep.Metric, whose sums are computed on the devices, "
                "or a smaller batch."
                if self.wanted
                else f"The carried state of this batch of {work.num_examples} examples has {size >> 20} MiB "
                f"({describe(carried)} in a shard of {examples}), and a step returns at most {LIMIT >> 20} MiB of it. "
                "Carry less, for example the last hidden state instead of all outputs, or use a smaller batch."
            )
        self._kept[shard] = found

    def _check_carried(self, carried: Any, shard: int) -> None:
        """Raises ModelError if no state can be carried now, or only some shards of the batch have one."""
        if carried is not None and self.refusal:
            raise ModelError(f"The objective returned lockstep.Carried, but {self.refusal}")
        others = {other: found.carried is None for other, found in self._kept.items() if other != shard}
        without = [other for other, is_missing in others.items() if is_missing]
        if carried is None and len(without) < len(others):
            raise explain_uncarried([shard])
        if carried is not None and without:
            raise explain_uncarried(without)

    def get_carried(self, shard: int) -> Any:
        """Returns the stored carried state of one shard; None if the shard has none."""
        return self._kept[shard].carried if shard in self._kept else None

    def read(self) -> dict[int, Outputs]:
        """Returns the stored outputs by shard, as numpy; they stay until the next batch."""
        return {
            shard: Outputs(*(None if each is None else transform(each, self._leaf) for each in found))
            for shard, found in self._kept.items()
        }

    def clear(self) -> None:
        """Drops all stored outputs."""
        self._work, self._kept = lambda: None, {}

    def _leaf(self, value: Any) -> Any:
        return [self._leaf(each) for each in value] if isinstance(value, list) else self.to_numpy(value)


@dataclass(frozen=True)
class CollectedOutputs:
    """The outputs of one batch's shards, from all processes."""

    shards: Mapping[int, Outputs]
    num_filled: int  # the number of shards that have examples

    @property
    def lost(self) -> list[int]:
        """The shards whose outputs were lost with a worker that ended between the step and their collection."""
        return [shard for shard in range(self.num_filled) if shard not in self.shards]

    @property
    def uncarried(self) -> list[int]:
        """The shards whose objective has returned no state."""
        return [shard for shard, found in self.shards.items() if found.carried is None]

    def join_carried(self) -> Any:
        """Returns the carried state of the whole batch in the order of its examples, as numpy.

        >>> CollectedOutputs({1: Outputs(carried=np.ones(1)), 0: Outputs(carried=np.zeros(2))}, 2).join_carried()
        array([0., 0., 1.])
        """
        if self.lost:
            raise StateError(
                f"The carried state of this step lacks shard {', '.join(map(str, self.lost))}: a worker ended between "
                "the step and the collection of the state. The step itself counts. Restore the last checkpoint, or "
                "start the next batch from the state with which a sequence begins."
            )
        states = [self.shards[shard].carried for shard in sorted(self.shards)]
        try:
            return join(states, np.concatenate)
        except Exception as error:
            raise ModelError(
                f"The carried states of the shards cannot be concatenated: {error}. They are "
                f"{' and '.join(dict.fromkeys(map(describe, states)))}. Return the same structure for every shard, "
                "with one row per example and the same other axes."
            ) from error


def explain_uncarried(shards: Sequence[int]) -> ModelError:
    """Returns the error for shards whose objective has returned no state, while others have."""
    return ModelError(
        f"The objective returned no state for shard {', '.join(map(str, shards))}, but lockstep.Carried for another "
        "shard or in an earlier step. Return lockstep.Carried(loss, state) in every step, from the first one on."
    )


def join_shards(shards: Mapping[int, Outputs]) -> tuple[Any, Any]:
    """Returns the outputs and targets of the whole batch, concatenated in the order of the shards.

    >>> join_shards({1: Outputs(np.ones(1), np.array([3])), 0: Outputs(np.zeros(2), np.array([1, 2]))})
    (array([0., 0., 1.]), array([1, 2, 3]))
    """
    pairs = [(shards[shard].outputs, shards[shard].targets) for shard in sorted(shards)]
    try:
        pair: tuple[Any, Any] = join(pairs, np.concatenate)
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
