"""Slices: one process's share of the tree's root, added up out of everybody's nodes.

All-reduce's traffic with our own order of additions: every process adds one
slice of the vectors for all. The additions of a slice run in blocks that stay in
the cache.
"""

from collections.abc import Mapping

from lockstep.backends.base import Backend, Node
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums

BLOCK = 1 << 17  # elements


def part(node: Node, ranges: Mapping[str, tuple[int, int]]) -> Node:
    """The named ranges of a node's vectors."""
    return {dtype: node[dtype][start:stop] for dtype, (start, stop) in ranges.items()}


def total_sums(backend: Backend, layout: Layout, held: Mapping[tree.Node, Node], num_shards: int) -> Sums:
    """The sums of the whole batch; they are few, so every process adds them all."""
    field = layout.fields[-1]
    ranges = {field.dtype: (field.offset, field.offset + field.size)}
    values = {node: part(value, ranges) for node, value in held.items()}
    total = tree.total(tree.root(num_shards), values, lambda left, right: backend.add(left, right, None))
    assert total is not None
    only = Layout((type(field)(field.name, field.dtype, field.shape, 0),), {field.dtype: field.size}, {})
    return backend.sums(total, only)


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


def divide_slice(backend: Backend, layout: Layout, ranges: Mapping[str, tuple[int, int]], out: Node, by: float) -> None:
    """Divides the gradient's share of the ranges, and leaves buffers and sums alone."""
    for dtype, (start, stop) in ranges.items():
        for first in range(start, min(stop, layout.divided.get(dtype, 0)), BLOCK):
            last = min(first + BLOCK, stop, layout.divided[dtype])
            backend.divide(part(out, {dtype: (first, last)}), by)


def _add(backend: Backend, node: tree.Node, held: Mapping[tree.Node, Node], out: Node) -> None:
    """Writes the value of `node` into `out`; only the last addition writes there."""
    if node not in held and node.stop - node.start > 1:
        values = [tree.total(half, held, lambda left, right: backend.add(left, right, None)) for half in node.halves]
        present = [value for value in values if value is not None]
        backend.add(present[0], present[1] if len(present) > 1 else None, out)
    else:
        backend.add(held[node], None, out)
