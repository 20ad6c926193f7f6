"""Adds one process's partial sums in tree order, as its shards' gradients are computed."""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.core import tree
from lockstep.core.plan import Plan
from lockstep.core.types import PartialSum

GetBuffer = Callable[[int, int, int], PartialSum]  # (replica, slot, shard) -> memory for a partial sum
Add = Callable[[PartialSum, PartialSum | None, PartialSum | None], PartialSum]


class Fold:
    """Takes each shard's leaf (its gradients and sums), and adds neighbouring partial sums once both are computed.

    So a process needs about log2(shards) buffers. `add(left, right, out)` is the backend's addition; `check`, if
    given, is called with every leaf before it is added. A backend that adds leaves itself does not use this class.

    >>> leaves = {0: {"float32": 1}, 1: {"float32": 2}, 2: {"float32": 3}}
    >>> def add(left, right, out):
    ...     return {"float32": (left["float32"], right["float32"])}
    >>> fold = Fold(Plan.even(3, [0]), {0: leaves}, lambda replica, slot, shard: {}, add)
    >>> for shard, leaf in leaves.items():
    ...     fold.push(shard, leaf)
    >>> fold.partial_sums()
    {Span(start=0, stop=3): {'float32': ((1, 2), 3)}}
    """

    def __init__(
        self,
        plan: Plan,
        pieces: Mapping[int, Mapping[int, Any]],
        get_buffer: GetBuffer,
        add: Add,
        check: Callable[[int, PartialSum], None] | None = None,
    ) -> None:
        self.is_single_leaf = plan.num_shards == 1 and len(plan.replicas) == 1  # no other process reads it
        self._programs = {replica: tree.program(shards, plan.num_shards) for replica, shards in pieces.items()}
        self._actions = {replica: iter(program.actions) for replica, program in self._programs.items()}
        self._next = {replica: next(actions, None) for replica, actions in self._actions.items()}
        self._replica_of = {shard: replica for replica, shards in pieces.items() for shard in shards}
        self._slots: dict[tuple[int, int], PartialSum] = {}
        self._get_buffer = get_buffer
        self._add = add
        self.check = check

    def get_buffer(self, shard: int) -> PartialSum:
        """Returns the memory into which the leaf of the replica's next shard is written."""
        replica = self._replica_of[shard]
        return self._get_buffer(replica, self._get_write(replica, shard).slot, shard)

    def push(self, shard: int, leaf: PartialSum) -> None:
        """Takes a shard's leaf, in ascending order on each replica, and makes the merges that this leaf completes."""
        replica = self._replica_of[shard]
        slot = self._get_write(replica, shard).slot
        if self.check is not None:
            self.check(shard, leaf)
        slots, actions = self._slots, self._actions[replica]
        slots[replica, slot] = leaf
        while isinstance(merge := next(actions, None), tree.Merge):
            left = slots[replica, merge.left]
            slots[replica, merge.left] = self._add(left, slots.pop((replica, merge.right)), left)
        self._next[replica] = merge

    def partial_sums(self) -> dict[tree.Span, PartialSum]:
        """Returns the partial sums that are left, each with the span of shards it covers."""
        assert not any(self._next.values()), f"a shard is missing: {self._next}"
        return {
            span: self._slots[replica, slot]
            for replica, program in self._programs.items()
            for span, slot in program.spans.items()
        }

    def _get_write(self, replica: int, shard: int) -> tree.Write:
        write = self._next[replica]
        assert isinstance(write, tree.Write), f"shard {shard} came after the last"
        assert write.shard == shard, f"shard {shard} came in the place of shard {write.shard}"
        return write
