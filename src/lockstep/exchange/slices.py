"""One process's slice of the tree's root, added from all processes' partial sums.

All-reduce's traffic with our own order of additions: every process adds one
slice of the vectors for all. The additions of a slice run in blocks that stay in
the cache.
"""

from collections.abc import Iterator, Mapping

from lockstep.backends.base import Backend, Node
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums, divisor

BLOCK = 1 << 17  # elements


def part(node: Node, ranges: Mapping[str, tuple[int, int]]) -> Node:
    """The named ranges of a node's vectors."""
    return {dtype: node[dtype][start:stop] for dtype, (start, stop) in ranges.items()}


class Slice:
    """One process's slice of memory that stays where it is: the views are made once, the additions every step."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        root: tree.Node,
        held: Mapping[tree.Node, Node],
        ranges: Mapping[str, tuple[int, int]],
        out: Node,
    ) -> None:
        self._backend = backend
        self._root = root
        field = layout.fields[-1]
        sums = {field.dtype: (field.offset, field.offset + field.size)}
        self._sums = {node: part(value, sums) for node, value in held.items()}
        self._only = Layout((type(field)(field.name, field.dtype, field.shape, 0),), {field.dtype: field.size}, {})
        self._blocks = [
            ({node: part(value, block) for node, value in held.items()}, part(out, block), divided)
            for block, divided in _blocks(layout, ranges)
        ]

    def add(self) -> Sums:
        """Adds in tree order, divides the gradient where the loss asks for it, and gives the sums of the whole batch.

        The sums are few, so every process adds them all.
        """
        total = tree.total(self._root, self._sums, lambda left, right: self._backend.add(left, right, None))
        assert total is not None
        sums = self._backend.sums(total, self._only)
        by = divisor(sums)
        for held, out, divided in self._blocks:
            _add(self._backend, self._root, held, out)
            if divided and by not in (0.0, 1.0):
                self._backend.divide(out, by)
        return sums


def _blocks(layout: Layout, ranges: Mapping[str, tuple[int, int]]) -> Iterator[tuple[dict[str, tuple[int, int]], bool]]:
    """The ranges in blocks that stay in the cache, and whether each is the gradient's, which is divided."""
    for dtype, (start, stop) in ranges.items():
        end = min(max(start, layout.divided.get(dtype, 0)), stop)
        for low, high, divided in ((start, end, True), (end, stop, False)):
            for first in range(low, high, BLOCK):
                yield {dtype: (first, min(first + BLOCK, high))}, divided


def divide(backend: Backend, layout: Layout, total: Node) -> Sums:
    """Divides the gradient of a whole root where the loss asks for it, and gives the sums."""
    sums = backend.sums(total, layout)
    by = divisor(sums)
    if by not in (0.0, 1.0):
        backend.divide({dtype: total[dtype][:end] for dtype, end in layout.divided.items()}, by)
    return sums


def add_slice(
    backend: Backend,
    held: Mapping[tree.Node, Node],
    ranges: Mapping[str, tuple[int, int]],
    out: Node,
    num_shards: int,
) -> None:
    """Adds the ranges of the held nodes in tree order into the same ranges of `out`."""
    for dtype, (start, stop) in ranges.items():
        for first in range(start, stop, BLOCK):
            block = {dtype: (first, min(first + BLOCK, stop))}
            values = {node: part(value, block) for node, value in held.items()}
            _add(backend, tree.root(num_shards), values, part(out, block))


def _add(backend: Backend, node: tree.Node, held: Mapping[tree.Node, Node], out: Node) -> None:
    """Writes the value of `node` into `out`; only the last addition writes there."""
    if node not in held and node.stop - node.start > 1:
        values = [tree.total(half, held, lambda left, right: backend.add(left, right, None)) for half in node.halves]
        present = [value for value in values if value is not None]
        backend.add(present[0], present[1] if len(present) > 1 else None, out)
    else:
        backend.add(held[node], None, out)
