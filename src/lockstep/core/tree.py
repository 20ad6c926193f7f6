"""The tree: the one order in which the shards' partial sums are added.

Floating-point addition is not associative, so a sum has as many answers as it has orders. The order here depends on the
number of shards and on nothing else. No device, process or clock appears in this file; that is why the answer is the
same on one device and on eight.

A *span* is a range of shards [start, stop), and a *partial sum* is the sum over a span. The root span covers all
shards. A span splits at the largest power of two inside it, which gives the merges of slot `i` with `i+1`, then `i+2`,
then `i+4` and so on. A shard without examples has no partial sum, and a merge with a missing side copies the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from lockstep.core.plan import Plan
from lockstep.errors import PlanError

Value = TypeVar("Value")


class Span(NamedTuple):
    """The shards from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def halves(self) -> tuple["Span", "Span"]:
        """The two spans whose partial sums are added to give this one's."""
        middle = self.start + (1 << ((self.stop - self.start - 1).bit_length() - 1))
        return Span(self.start, middle), Span(middle, self.stop)


def root(num_shards: int) -> Span:
    """Returns the span of all shards."""
    if num_shards < 1:
        raise PlanError(f"num_shards must be 1 or more. Got num_shards={num_shards}. Use num_shards=1, for example.")
    return Span(0, num_shards)


def total(span: Span, held: Mapping[Span, Value], add: Callable[[Value, Value], Value]) -> Value | None:
    """Adds up the value of `span` in tree order from the partial sums in `held`; None if there are none.

    >>> total(root(3), {Span(0, 1): "a", Span(1, 2): "b", Span(2, 3): "c"}, lambda x, y: f"({x}+{y})")
    '((a+b)+c)'
    """
    if span in held:
        return held[span]
    if span.stop - span.start == 1:
        return None
    left, right = (total(half, held, add) for half in span.halves)
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def fold(values: Sequence[Value | None], add: Callable[[Value, Value], Value]) -> Value | None:
    """Adds one value per shard in tree order; None marks a shard without examples."""
    held = {Span(i, i + 1): value for i, value in enumerate(values) if value is not None}
    return total(root(len(values)), held, add)


class Write(NamedTuple):
    """Compute the partial sum of `shard` into memory slot `slot`."""

    shard: int
    slot: int


class Merge(NamedTuple):
    """Add slot `right` into slot `left`; slot `right` is free afterwards."""

    left: int
    right: int


@dataclass(frozen=True)
class MergeProgram:
    """What one process does with its shards: slots to write, merges to make, and the partial sums that remain.

    A merge follows as soon as both sides are computed, so that k shards need only about log2(k) slots. The program is a
    pure function of the shards, so every process knows which partial sum every other process has in which slot.
    """

    actions: tuple[Write | Merge, ...]
    slots: int
    spans: Mapping[Span, int]  # the slot of each partial sum that remains

    @property
    def shards(self) -> list[int]:
        """The shards that are computed, in their order."""
        return [action.shard for action in self.actions if isinstance(action, Write)]


def program(shards: Iterable[int], num_shards: int) -> MergeProgram:
    """Returns the program of a process that computes `shards` (only those with examples).

    >>> program([0, 1, 2], 8).actions
    (Write(shard=0, slot=0), Write(shard=1, slot=1), Merge(left=0, right=1), Write(shard=2, slot=1))
    >>> dict(program([0, 1, 2], 8).spans)
    {Span(start=0, stop=2): 0, Span(start=2, stop=3): 1}
    """
    return _program(tuple(sorted(shards)), num_shards)


@cache
def _program(shards: tuple[int, ...], num_shards: int) -> MergeProgram:
    actions: list[Write | Merge] = []
    free: list[int] = []
    slots = 0
    spans: dict[Span, int] = {}
    parents = {half: span for span in _walk_inner(root(num_shards)) for half in span.halves}
    for shard in shards:
        if not free:
            free.append(slots)
            slots += 1
        slot = free.pop()
        actions.append(Write(shard, slot))
        span = Span(shard, shard + 1)
        spans[span] = slot
        while (parent := parents.get(span)) is not None and all(half in spans for half in parent.halves):
            left, right = (spans.pop(half) for half in parent.halves)
            actions.append(Merge(left, right))
            free.append(right)
            spans[parent] = left
            span = parent
    return MergeProgram(tuple(actions), slots, spans)


def programs(plan: Plan, filled: int) -> list[MergeProgram]:
    """Returns the programs of the plan's replicas, in order, if the first `filled` shards are not empty."""
    return [
        program([shard for shard in plan.shards_of([replica]) if shard < filled], plan.num_shards)
        for replica in plan.replicas
    ]


def _walk_inner(span: Span) -> Iterator[Span]:
    if span.stop - span.start > 1:
        yield span
        for half in span.halves:
            yield from _walk_inner(half)
