"""One process's slice of the root, added from all processes' partial sums.

The traffic is that of an all-reduce, but the additions run in tree order: every process adds one slice of the vectors
for all processes. The additions of a slice run in blocks that fit into the cache.
"""

from collections.abc import Mapping

from lockstep.backends.base import Backend
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.types import PartialSum

BLOCK = 1 << 17  # elements


def select_ranges(node: PartialSum, ranges: Mapping[str, tuple[int, int]]) -> PartialSum:
    """Returns views of the given ranges of a partial sum's vectors."""
    return {dtype: node[dtype][start:stop] for dtype, (start, stop) in ranges.items()}


class RangeSum:
    """The sum over one range of a vector; `values` and `out` are views of this range alone.

    The views are created once, the additions run in every step. The first `num_divided` elements belong to the
    gradient.
    """

    def __init__(
        self,
        backend: Backend,
        span: tree.Span,
        values: Mapping[tree.Span, PartialSum],
        out: PartialSum,
        num_divided: int,
    ) -> None:
        self._backend = backend
        self._span = span
        ((dtype, vector),) = out.items()
        self._blocks = [
            (
                {span: select_ranges(value, block) for span, value in values.items()},
                select_ranges(out, block),
                block[dtype][1] <= num_divided,
            )
            for low, high in ((0, num_divided), (num_divided, len(vector)))
            for block in ({dtype: (first, min(first + BLOCK, high))} for first in range(low, high, BLOCK))
        ]

    def add(self, by: float) -> None:
        """Adds in tree order, and divides the gradient by `by`, unless `by` is 1."""
        for values, out, divided in self._blocks:
            _add(self._backend, self._span, values, out)
            if divided and by not in (0.0, 1.0):
                self._backend.divide(out, by)


class Slice:
    """One process's slice of buffers at fixed addresses."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        root: tree.Span,
        partial_sums: Mapping[tree.Span, PartialSum],
        ranges: Mapping[str, tuple[int, int]],
        out: PartialSum,
    ) -> None:
        self._sums = []
        for dtype, (start, stop) in ranges.items():
            own = {dtype: (start, stop)}
            values = {span: select_ranges(value, own) for span, value in partial_sums.items()}
            num_divided = min(max(layout.divided.get(dtype, 0) - start, 0), stop - start)
            self._sums.append(RangeSum(backend, root, values, select_ranges(out, own), num_divided))

    def add(self, by: float) -> None:
        """Adds in tree order, and divides the gradient by `by`, unless `by` is 1."""
        for each in self._sums:
            each.add(by)


def divide(backend: Backend, layout: Layout, total: PartialSum, by: float) -> None:
    """Divides the gradient in a complete root by `by`, unless `by` is 1."""
    if by not in (0.0, 1.0):
        backend.divide({dtype: total[dtype][:end] for dtype, end in layout.divided.items()}, by)


def _add(backend: Backend, span: tree.Span, partial_sums: Mapping[tree.Span, PartialSum], out: PartialSum) -> None:
    """Writes the value of `span` into `out`. Only the last addition writes to `out`; the others allocate."""
    if span not in partial_sums and span.stop - span.start > 1:
        values = [
            tree.total(half, partial_sums, lambda left, right: backend.add(left, right, None)) for half in span.halves
        ]
        present = [value for value in values if value is not None]
        backend.add(present[0], present[1] if len(present) > 1 else None, out)
    else:
        backend.add(partial_sums[span], None, out)
