"""Partial sums as flat vectors in host memory, for backends that let numpy add them in one thread.

One loop over the elements gives the same sum in every process. A framework's own addition
may split a vector over threads, some of which flush denormal numbers to zero while others do
not, and a compiler may reorder a tree of additions.
"""

from typing import Any

import numpy as np

from lockstep.core.layout import Field, Layout
from lockstep.core.types import PartialSum


def create_buffer(layout: Layout, memory: memoryview | None = None) -> PartialSum:
    """Returns the vectors of a partial sum as views of the given memory, or of new memory."""
    block = memoryview(bytearray(layout.nbytes)) if memory is None else memory
    return {
        dtype: np.frombuffer(block, dtype, length, layout.starts[dtype]) for dtype, length in layout.lengths.items()
    }


def view(node: PartialSum, field: Field) -> Any:
    """Returns a view of one array of a partial sum."""
    return node[field.dtype][field.offset : field.offset + field.size].reshape(field.shape)


def add(left: PartialSum, right: PartialSum | None, out: PartialSum | None) -> PartialSum:
    """Returns left + right, in `out` (which may be `left`) or in new memory; if `right` is None, copies `left`."""
    if right is None:
        assert out is not None
        for dtype, vector in left.items():
            out[dtype][:] = vector
        return out
    if out is None:
        return {dtype: vector + right[dtype] for dtype, vector in left.items()}
    for dtype, vector in left.items():
        np.add(vector, right[dtype], out=out[dtype])
    return out


def divide(total: PartialSum, by: float) -> None:
    """Divides every element of a partial sum in place."""
    for vector in total.values():
        vector /= by
