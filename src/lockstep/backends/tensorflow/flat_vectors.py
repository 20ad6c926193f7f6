"""Nodes: flat vectors in host memory, added by one thread.

TensorFlow's own addition splits a vector over threads, of which some flush denormal
numbers to zero and the calling one does not. numpy's addition is one loop, so a sum
is the same wherever it is made. It also keeps Grappler, which would reorder a tree of
additions inside a graph, away from ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends.base import Node
from lockstep.core import tree
from lockstep.core.layout import Field, Layout
from lockstep.core.metrics import FIRST_METRIC
from lockstep.core.shard_sums import NUM_CHECKS


def accumulated(variable: Any) -> str:
    """The type in which leaves of this variable are added: float64 stays, smaller floats are added in float32."""
    dtype = tf.as_dtype(variable.dtype)
    if not dtype.is_floating:
        return "int64"
    return "float64" if dtype == tf.float64 else "float32"


def layout(trained: Mapping[str, Any], kept: Mapping[str, Any], room: int) -> Layout:
    """Gradients first, then running statistics, the flags that tell which of both were there, and the sums."""
    return Layout.of(
        [(name, accumulated(variable), tuple(variable.shape)) for name, variable in trained.items()],
        [
            *((name, accumulated(variable), tuple(variable.shape)) for name, variable in kept.items()),
            ("there", "int64", (len(trained) + len(kept),)),
            ("sums", "float64", (FIRST_METRIC + room + NUM_CHECKS,)),
        ],
    )


def allocate(layout: Layout, memory: memoryview | None) -> Node:
    """Vectors in the given memory, or new ones."""
    block = memoryview(bytearray(layout.nbytes)) if memory is None else memory
    return {
        dtype: np.frombuffer(block, dtype, length, layout.starts[dtype]) for dtype, length in layout.lengths.items()
    }


def view(node: Node, field: Field) -> Any:
    """One array of a node, to read or to write."""
    return node[field.dtype][field.offset : field.offset + field.size].reshape(field.shape)


def write(node: Node, fields: Sequence[Field], values: Sequence[Any]) -> None:
    """Copies arrays into the fields; None counts as zero."""
    for field, value in zip(fields, values, strict=True):
        view(node, field)[...] = 0 if value is None else value


def add(left: Node, right: Node | None, out: Node | None) -> Node:
    """left + right; a copy of left where right is missing."""
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
    """Divides every element, in place."""
    for vector in total.values():
        vector /= by


def finish(nodes: Mapping[Any, Node], num_shards: int) -> Node:
    """The root, added up in place."""
    total = tree.total(tree.root(num_shards), nodes, lambda left, right: add(left, right, left))
    assert total is not None
    return total
