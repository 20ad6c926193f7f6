"""Stores the shards' sums on the device until all are read at once, so that the host does not wait for each."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lockstep.core.metrics import FIRST_METRIC
from lockstep.core.shard_sums import OwnSummand, Summand, check_room

_read_form = attrgetter("dtype", "shape", "device")


class ShardRows:
    """One row of sums for each shard, built from tensors and numbers.

    >>> rows = ShardRows()
    >>> rows.add(0, [Summand(torch.tensor(2.0), 3.0), Summand(4), OwnSummand(torch.tensor([True, False]))])
    >>> rows.add(1, [Summand(torch.tensor(1.0), 3.0), Summand(5), OwnSummand(torch.tensor([True, True]))])
    >>> rows.read(room=4)
    {0: [6.0, 4.0, 1.0, 0.0], 1: [3.0, 5.0, 2.0, 0.0]}
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Summand]] = {}
        self._means: set[int] = set()  # the shards whose first entry is a mean, to be multiplied by the second

    def add(self, shard: int, parts: Sequence[Summand], is_mean: bool = False) -> None:
        """Stores a shard's summands, in place of those of an earlier pass; `is_mean` is from the shard's `Term`."""
        self._parts[shard] = [part if type(part[0]) is float else _keep(part) for part in parts]
        if is_mean:
            self._means.add(shard)
        else:
            self._means.discard(shard)

    def select(self, shard: int) -> "ShardRows":
        """Returns a ShardRows with the row of this shard alone."""
        selected = ShardRows()
        selected._parts[shard] = self._parts[shard]
        selected._means = self._means & {shard}
        return selected

    def tensors(self, shard: int) -> list[Tensor]:
        """Returns the tensors among a shard's summands."""
        return [value for value, _ in self._parts[shard] if isinstance(value, Tensor)]

    def read(self, room: int) -> dict[int, list[float]]:
        """Returns each shard's sums, padded with zeros to `room` numbers; waits for the device."""
        try:
            columns = _read_columns(list(zip(*self._parts.values(), strict=True)))
        except (AttributeError, RuntimeError, TypeError, ValueError):  # one shard's metrics have another form
            if len(self._parts) == 1:
                raise
            return {shard: self.select(shard).read(room)[shard] for shard in self._parts}
        check_room(len(columns) - FIRST_METRIC, room - FIRST_METRIC)
        zeros = [0.0] * (room - len(columns))
        rows = {shard: [*row, *zeros] for shard, row in zip(self._parts, zip(*columns, strict=True), strict=False)}
        for shard in self._means:
            loss, weight, _, *rest = rows[shard]
            rows[shard] = [loss * weight, weight, 0.0, *rest] if weight else [0.0, 0.0, 1.0, *rest]
        return rows


def _keep(part: Summand) -> Summand:
    """Returns the summand with a copy of its tensor, because the next shard may write to what a metric returned."""
    value, times = part
    if isinstance(value, Tensor):
        if type(part) is OwnSummand:
            return OwnSummand(value.detach(), times) if value.requires_grad else part
        return Summand(value.detach().to(torch.float64, copy=True), times)
    is_number = type(part) is OwnSummand or isinstance(value, int | float)
    return part if is_number else Summand(torch.as_tensor(value, dtype=torch.float64), times)


def _read_columns(places: Sequence[tuple[Summand, ...]]) -> list[Sequence[float]]:
    """Returns columns of numbers, one number for each shard; raises if the parts at one place have unequal shapes."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}  # those of one form are stacked
    forms = [_read_form(place[0].value) if isinstance(place[0].value, Tensor) else None for place in places]
    for form, place in zip(forms, places, strict=True):
        if form is not None:
            groups.setdefault(form, []).extend([value for value, _ in place])
    stacks = [_stack(values) for values in groups.values()]
    numbers: list[float] = _join(stacks).tolist() if stacks else []
    starts = dict(zip(groups, accumulate([stack.numel() for stack in stacks], initial=0), strict=False))
    columns: list[Sequence[float]] = []
    for form, place in zip(forms, places, strict=True):
        if form is None:
            columns.append([value * times for value, times in place])
            continue
        start, count, width = starts[form], len(place), _get_width(form)
        starts[form] = stop = start + count * width
        for first in range(start, start + width):
            own = numbers[first:stop:width]
            columns.append([number * times for number, (_, times) in zip(own, place, strict=True)])
    return columns


def _get_width(form: tuple[Any, ...]) -> int:
    """Returns how many numbers a tensor of this form adds to a row: 1 for bools, which are counted, else one each."""
    dtype, shape, _ = form
    return 1 if dtype == torch.bool else prod(shape)


def _join(stacks: list[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat([stack.to(stacks[0].device) for stack in stacks])


def _stack(values: list[Tensor]) -> Tensor:
    """Returns all tensors' elements as one vector; for bool tensors the number of true elements of each."""
    first, count = values[0], len(values)
    if first.dtype == torch.bool and len(set(map(_read_form, values))) > 1:
        return torch.stack([value.count_nonzero() for value in values]).double()
    stack = torch.stack(values) if count > 1 else first
    if first.dtype == torch.bool:
        return stack.view(count, -1).sum(1, dtype=torch.float64)
    stack = stack.reshape(-1)
    return stack if first.is_floating_point() else stack.double()  # beside floats, integers would become float32
