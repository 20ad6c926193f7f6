"""Refuse float state that is a queue or a memory, because its average over the shards makes no sense.

Running statistics are averaged: every shard starts from the same values and moves them by a part of themselves. A
queue (MoCo's, or a memory bank) has rows that a shard replaces and rows that it leaves. Averaged, every row would be a
mixture, which no error shows. The first steps compare what each shard leaves with what it started from.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.core.layout import Field, Layout
from lockstep.errors import ModelError

CHECKED = 3  # steps that change an array, after which it is known what it is
FOLLOWED = 100  # steps after the last change for which every step is checked
_TOLERANCE = 1e-6  # relative: a leaf has the values times the shard's part of the batch, rounded
_MOVED = 0.5  # of a slice's norm: a running mean moves by less

Node = Mapping[str, Any]


class AveragedArray(NamedTuple):
    """A float array of the state that a step averages, as it is before the step."""

    field: str  # its name in the layout of a leaf
    name: str
    before: NDArray[Any]
    writable: bool = True  # whether the script can write to it between steps


class QueueGuard:
    """The check of one process's leaves, in the steps in which it is due.

    Every step counts until an array has changed in `CHECKED` of them, or not for `FOLLOWED` steps. Otherwise the steps
    are the first ones and those whose number is a power of two, because reading a leaf waits for the device.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._last_change = 0  # the step
        self._changes: dict[str, int] = {}  # by an array's field, the steps that have changed it
        self._moved: set[str] = set()  # in this step
        self._arrays: list[AveragedArray] | None = None
        self._fields: dict[str, Field] = {}

    def is_due(self) -> bool:
        """Begin a step; return whether its leaves are to be checked."""
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
        leaf: Node,
        fraction: float,
        layout: Layout,
        averaged: Callable[[], list[AveragedArray]],
        to_host: Callable[[Any], Any],
    ) -> None:
        """Raise if the shard of this leaf, `fraction` of the batch, has used a float array of the state as a queue."""
        if self._arrays is None:  # asked at the first leaf: some backends know only then what a shard changes
            self._fields = {field.name: field for field in layout.fields}
            self._arrays = [
                each for each in averaged() if each.before.ndim > 1 and self._changes.get(each.field, 0) < CHECKED
            ]
        for array in self._arrays:
            field = self._fields[array.field]
            stored = np.asarray(to_host(leaf[field.dtype][field.offset : field.offset + field.size]), np.float64)
            if not stored.any():  # the shard has not changed it; an array that is zeroed whole is no queue
                continue
            after = stored.reshape(field.shape) / fraction
            if not _differs(array.before, after).any():
                continue
            self._moved.add(array.field)
            axis = find_replaced_axis(array.before, after)
            if axis is not None:
                raise ModelError(_explain(array, axis))


def find_replaced_axis(before: NDArray[Any], after: NDArray[Any]) -> int | None:
    """Return the axis along which some slices were replaced and others, which hold something, were left, or None.

    A slice of a running mean moves by a part of itself, and what stays is 0. Of slices with one element, as in batch
    norm's vectors, nothing can be concluded: a channel without input stays as it is.
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
    between = "Write to it between the steps, in the script, from where it reaches every replica; or use shards=1"
    copied = (
        "Use shards=1, where nothing is averaged; or an nnx module, to whose variables the script can write between "
        "the steps."
    )
    return (
        f"A float buffer is averaged over the shards, as running statistics are. In {array.name!r} of shape "
        f"{tuple(array.before.shape)} a pass replaces some slices along axis {axis} and leaves others as they are, as "
        "in a queue or a memory, of which an average makes no sense. "
        + (f"{between}, where nothing is averaged." if array.writable else copied)
    )
