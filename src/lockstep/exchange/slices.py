"""One process's slice of the root, added from all processes' partial sums.

The traffic is that of an all-reduce, in our own order of additions: every process adds one slice of the vectors for all
processes. The additions of a slice run in blocks that fit into the cache.
"""

from collections.abc import Iterator, Mapping

from lockstep.backends.base import Backend, Node
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.metrics import Sums, divisor

BLOCK = 1 << 17  # elements


def select_ranges(node: Node, ranges: Mapping[str, tuple[int, int]]) -> Node:
    """Returns views of the given ranges of a partial sum's vectors."""
    return {dtype: node[dtype][start:stop] for dtype, (start, stop) in ranges.items()}


class Slice:
    """One process's slice of buffers at fixed addresses: views are created once, the additions run every step."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        root: tree.Span,
        partial_sums: Mapping[tree.Span, Node],
        ranges: Mapping[str, tuple[int, int]],
        out: Node,
    ) -> None:
        self._backend = backend
        self._root = root
        field = layout.fields[-1]
        sums = {field.dtype: (field.offset, field.offset + field.size)}
        self._sums = {span: select_ranges(value, sums) for span, value in partial_sums.items()}
        self._sums_layout = Layout(
            (type(field)(field.name, field.dtype, field.shape, 0),), {field.dtype: field.size}, {}
        )
        self._blocks = [
            (
                {span: select_ranges(value, block) for span, value in partial_sums.items()},
                select_ranges(out, block),
                divided,
            )
            for block, divided in _iterate_blocks(layout, ranges)
        ]

    def add(self) -> Sums:
        """Adds in tree order, divides the gradient if the loss asks for it, and returns the sums of the whole batch.

        Every process adds all of the sums itself, because they are a few numbers and needed before the division.
        """
        total = tree.total(self._root, self._sums, lambda left, right: self._backend.add(left, right, None))
        assert total is not None
        sums = self._backend.sums(total, self._sums_layout)
        by = divisor(sums)
        for partial_sums, out, divided in self._blocks:
            _add(self._backend, self._root, partial_sums, out)
            if divided and by not in (0.0, 1.0):
                self._backend.divide(out, by)
        return sums


def _iterate_blocks(
    layout: Layout, ranges: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[dict[str, tuple[int, int]], bool]]:
    """Yields the ranges in blocks that fit into the cache, each with whether it is gradient, which is divided."""
    for dtype, (start, stop) in ranges.items():
        end = min(max(start, layout.divided.get(dtype, 0)), stop)
        for low, high, divided in ((start, end, True), (end, stop, False)):
            for first in range(low, high, BLOCK):
                yield {dtype: (first, min(first + BLOCK, high))}, divided


def divide(backend: Backend, layout: Layout, total: Node) -> Sums:
    """Divides the gradient of a whole root if the loss asks for it, and returns the sums."""
    sums = backend.sums(total, layout)
    by = divisor(sums)
    if by not in (0.0, 1.0):
        backend.divide({dtype: total[dtype][:end] for dtype, end in layout.divided.items()}, by)
    return sums


def add_slice(
    backend: Backend,
    partial_sums: Mapping[tree.Span, Node],
    ranges: Mapping[str, tuple[int, int]],
    out: Node,
    num_shards: int,
) -> None:
    """Adds the ranges of the partial sums in tree order into the same ranges of `out`."""
    for dtype, (start, stop) in ranges.items():
        for first in range(start, stop, BLOCK):
            block = {dtype: (first, min(first + BLOCK, stop))}
            values = {span: select_ranges(value, block) for span, value in partial_sums.items()}
            _add(backend, tree.root(num_shards), values, select_ranges(out, block))


def _add(backend: Backend, span: tree.Span, partial_sums: Mapping[tree.Span, Node], out: Node) -> None:
    """Writes the value of `span` into `out`. Only the last addition writes there, the others allocate."""
    if span not in partial_sums and span.stop - span.start > 1:
        values = [
            tree.total(half, partial_sums, lambda left, right: backend.add(left, right, None)) for half in span.halves
        ]
        present = [value for value in values if value is not None]
        backend.add(present[0], present[1] if len(present) > 1 else None, out)
    else:
        backend.add(partial_sums[span], None, out)
