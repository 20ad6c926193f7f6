"""Partial sums as flat vectors in host memory, for backends that let numpy add them in one thread.

One loop over the elements gives the same sum wherever it runs. A framework's own addition
may split a vector over threads of which some flush denormal numbers to zero and others do
not, and a compiler may reorder a tree of additions.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.backends.base import Node
from lockstep.core import tree
from lockstep.core.layout import Field, Layout


def allocate(layout: Layout, memory: memoryview | None = None) -> Node:
    """Lay the vectors of a partial sum into the given memory, or into new memory."""
    block = memoryview(bytearray(layout.nbytes)) if memory is None else memory
    return {
        dtype: np.frombuffer(block, dtype, length, layout.starts[dtype]) for dtype, length in layout.lengths.items()
    }


def view(node: Node, field: Field) -> Any:
    """Return one array of a partial sum, to read or to write in place."""
    return node[field.dtype][field.offset : field.offset + field.size].reshape(field.shape)


def add(left: Node, right: Node | None, out: Node | None) -> Node:
    """Add into `out`, which may be `left`, or into new memory; without `right` copy `left`."""
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


def divide(total: Node, by: float) -> None:
    """Divide every element in place."""
    for vector in total.values():
        vector /= by


def add_tree(nodes: Mapping[Any, Node], num_shards: int) -> Node:
    """Add partial sums in tree order, each into the left of two, and return the root."""
    total = tree.total(tree.root(num_shards), nodes, lambda left, right: add(left, right, left))
    assert total is not None
    return total
