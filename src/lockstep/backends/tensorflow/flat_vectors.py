"""The layout of a partial sum, which lies in host memory and is added by numpy in one thread.

TensorFlow's own addition splits a vector over threads, of which some flush denormal
numbers to zero and the calling one does not. Adding on the host also keeps Grappler, which
would reorder a tree of additions inside a graph, away from ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lockstep.backends import host_vectors
from lockstep.backends.base import Node
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
    return Layout.build(
        [(name, accumulated(variable), tuple(variable.shape)) for name, variable in trained.items()],
        [
            *((name, accumulated(variable), tuple(variable.shape)) for name, variable in kept.items()),
            ("there", "int64", (len(trained) + len(kept),)),
            ("sums", "float64", (FIRST_METRIC + room + NUM_CHECKS,)),
        ],
    )


def write(node: Node, fields: Sequence[Field], values: Sequence[Any]) -> None:
    """Copy arrays into the fields; None counts as zero."""
    for field, value in zip(fields, values, strict=True):
        host_vectors.view(node, field)[...] = 0 if value is None else value
