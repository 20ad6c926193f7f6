"""The tree: the one order in which the shards' leaves are added.

Floating-point addition is not associative, so a sum has as many answers as it
has orders. The order here depends on the number of shards and on nothing else.
No device, process or clock appears in this file; that is why the answer is the
same on one device and on eight.

A *node* is a partial sum and covers the shards [start, stop). The root covers
them all. A node splits at the largest power of two inside it, which gives the
merges of slot `i` with `i+1`, then `i+2`, then `i+4` and so on. A shard without
examples has no leaf, and a merge with a missing side copies the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from lockstep.core.plan import Plan
from lockstep.errors import PlanError

Value = TypeVar("Value")


class Node(NamedTuple):
    """A partial sum: the shards from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def halves(self) -> tuple["Node", "Node"]:
        """The two nodes whose sum this one is."""
        middle = self.start + (1 << ((self.stop - self.start - 1).bit_length() - 1))
        return Node(self.start, middle), Node(middle, self.stop)


def root(num_shards: int) -> Node:
    """The node that covers every shard."""
    if num_shards < 1:
        raise PlanError(f"A tree needs at least one shard. Got num_shards={num_shards}. Use num_shards=1 or more.")
    return Node(0, num_shards)


def total(node: Node, held: Mapping[Node, Value], add: Callable[[Value, Value], Value]) -> Value | None:
    """The value of `node`, added up in tree order from the nodes that are `held`; None where nothing is.

    >>> total(root(3), {Node(0, 1): "a", Node(1, 2): "b", Node(2, 3): "c"}, lambda x, y: f"({x}+{y})")
    '((a+b)+c)'
    """
    if node in held:
        return held[node]
    if node.stop - node.start == 1:
        return None
    left, right = (total(half, held, add) for half in node.halves)
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def fold(values: Sequence[Value | None], add: Callable[[Value, Value], Value]) -> Value | None:
    """Adds one value per shard in tree order; None stands for a shard without examples."""
    held = {Node(i, i + 1): value for i, value in enumerate(values) if value is not None}
    return total(root(len(values)), held, add)


class Write(NamedTuple):
    """Compute the leaf of `shard` into memory slot `slot`."""

    shard: int
    slot: int


class Merge(NamedTuple):
    """Add slot `right` into slot `left`; slot `right` is free afterwards."""

    left: int
    right: int


@dataclass(frozen=True)
class Program:
    """What one process does with its shards: leaves to write, merges to make, and the nodes that stay behind.

    A merge comes as soon as both sides are there, so that k shards need only
    about log2(k) slots. It is a pure function of the shards, so every process
    knows in which slot every other process keeps which node.
    """

    actions: tuple[Write | Merge, ...]
    slots: int
    nodes: Mapping[Node, int]


def program(shards: Iterable[int], num_shards: int) -> Program:
    """The program of a process that computes `shards`, those without examples left out.

    >>> program([0, 1, 2], 8).actions
    (Write(shard=0, slot=0), Write(shard=1, slot=1), Merge(left=0, right=1), Write(shard=2, slot=1))
    >>> dict(program([0, 1, 2], 8).nodes)
    {Node(start=0, stop=2): 0, Node(start=2, stop=3): 1}
    """
    return _program(tuple(sorted(shards)), num_shards)


@cache
def _program(shards: tuple[int, ...], num_shards: int) -> Program:
    actions: list[Write | Merge] = []
    free: list[int] = []
    slots = 0
    nodes: dict[Node, int] = {}
    parents = {half: node for node in _inner(root(num_shards)) for half in node.halves}
    for shard in shards:
        if not free:
            free.append(slots)
            slots += 1
        slot = free.pop()
        actions.append(Write(shard, slot))
        node = Node(shard, shard + 1)
        nodes[node] = slot
        while (parent := parents.get(node)) is not None and all(half in nodes for half in parent.halves):
            left, right = (nodes.pop(half) for half in parent.halves)
            actions.append(Merge(left, right))
            free.append(right)
            nodes[parent] = left
            node = parent
    return Program(tuple(actions), slots, nodes)


def programs(plan: Plan, num_examples: int) -> list[Program]:
    """The program of every replica for a batch of that many examples, so that all know where all nodes are."""
    filled = min(num_examples, plan.num_shards)  # larger shards come first, so empty ones are last
    return [
        program([shard for shard in plan.shards_of([replica]) if shard < filled], plan.num_shards)
        for replica in range(plan.num_replicas)
    ]


def _inner(node: Node) -> Iterator[Node]:
    if node.stop - node.start > 1:
        yield node
        for half in node.halves:
            yield from _inner(half)
