"""Detects float buffers that a model uses as a queue or a memory bank, whose average over the shards is meaningless.

Float buffers are averaged over the shards, which is right for running statistics: every shard starts from the same
values and moves all of them a little. In a queue (as in MoCo) a shard replaces some rows and does not touch the rest.
The average over the shards would mix old and new rows without any error. So some steps, the first ones among them,
compare each buffer after a shard's pass with the buffer before it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.layout import Field, Layout
from lockstep.core.types import PartialSum
from lockstep.errors import ModelError

CHECKED = 3  # an array that this many checked steps have changed is not checked again
FOLLOWED = 100  # for this many steps after the last change every step is checked
_TOLERANCE = 1e-6  # relative; a leaf holds the values times the shard's fraction of the batch, rounded
_MOVED = 0.5  # relative to a slice's norm; a running mean moves by less, a replaced row by more


class AveragedArray(NamedTuple):
    """A float array of the state that a step averages over the shards, with its value before the step."""

    field: str  # the array's name in the layout of the partial sums
    name: str
    before: NDArray[Any]
    writable: bool = True  # whether the script can write to it between steps


class QueueGuard:
    """Checks in some of the steps how the shards of this process change the averaged arrays.

    The first steps are checked, and later the steps whose number is a power of two; not every step, because reading a
    leaf waits for the device. Once an array has changed, every step is checked until the array has changed in `CHECKED`
    steps, or no array has changed for `FOLLOWED` steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._last_change = 0  # the number of the last step that changed an array
        self._changes: dict[str, int] = {}  # how many steps have changed an array, by its field
        self._moved: set[str] = set()  # the fields of the arrays that this step has changed
        self._arrays: list[AveragedArray] | None = None
        self._fields: dict[str, Field] = {}

    def is_due(self) -> bool:
        """Begins a step, and returns whether `check` is to be called for the shards of this step."""
        if self._moved:
            self._last_change = self._steps
        for field in self._moved:
            self._changes[field] = self._changes.get(field, 0) + 1
        self._moved.clear()
        self._arrays = None
        self._steps += 1
        early = self._steps <= CHECKED or self._steps & (self._steps - 1) == 0
        follows = self._steps - self._last_change <= FOLLOWED
        return early or (follows and any(changes < CHECKED for changes in self._changes.values()))

    def check(
        self,
        leaf: PartialSum,
        fraction: float,
        layout: Layout,
        averaged: Callable[[], list[AveragedArray]],
        to_host: Callable[[Any], Any],
    ) -> None:
        """Raises if a shard has replaced some slices of an averaged array and left other slices unchanged.

        `fraction` is the shard's part of the batch's examples, by which the arrays in `leaf` are multiplied.
        """
        if self._arrays is None:  # not before the first leaf, because some backends know only then what a shard changes
            self._fields = {field.name: field for field in layout.fields}
            self._arrays = [
                each for each in averaged() if each.before.ndim > 1 and self._changes.get(each.field, 0) < CHECKED
            ]
        for array in self._arrays:
            field = self._fields[array.field]
            stored = np.asarray(to_host(leaf[field.dtype][field.offset : field.offset + field.size]), np.float64)
            if not stored.any():  # either the shard has not changed the array, or set all of it to 0, unlike a queue
                continue
            after = stored.reshape(field.shape) / fraction
            if not _differs(array.before, after).any():
                continue
            self._moved.add(array.field)
            axis = find_replaced_axis(array.before, after)
            if axis is not None:
                raise ModelError(_explain(array, axis))


def find_replaced_axis(before: NDArray[Any], after: NDArray[Any]) -> int | None:
    """Returns the axis along which some slices were replaced and others are unchanged; None if there is no such axis.

    A slice has been replaced if it moved by more than half of its norm: a running mean moves by less. Unchanged slices
    of zeros do not count. Vectors, such as batch norm's statistics, are skipped, because a channel without input stays
    unchanged there too.
    """
    differing = _differs(before, after)
    before, after = before.astype(np.float64), after.astype(np.float64)
    for axis, length in enumerate(before.shape):
        if length < 2 or before.size // length < 2:
            continue
        old, new, differs = (np.moveaxis(each, axis, 0).reshape(length, -1) for each in (before, after, differing))
        moved = differs.all(1) & (np.linalg.norm(new - old, axis=1) > _MOVED * np.linalg.norm(old, axis=1))
        left = ~differs.any(1) & (old != 0).any(1)
        if moved.any() and left.any():
            return axis
    return None


def _differs(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    old = before.astype(np.float64)
    return ~(np.abs(after - old) <= _TOLERANCE * np.abs(old))  # NaN differs


def _explain(array: AveragedArray, axis: int) -> str:
    update_in_script = (
        "Update the buffer in the script between two steps, from where it is copied to every replica; or use shards=1, "
        "with which nothing is averaged."
    )
    use_one_shard = (
        "Use shards=1, with which nothing is averaged; or use an nnx module, whose variables the script can update "
        "between two steps."
    )
    return (
        f"The model's forward pass replaces some slices of the buffer {array.name!r} of shape "
        f"{tuple(array.before.shape)} along axis {axis} and leaves other slices unchanged, as in a queue or a memory "
        "bank. Lockstep averages float buffers over the shards, which would mix old and new slices. "
        + (update_in_script if array.writable else use_one_shard)
    )
