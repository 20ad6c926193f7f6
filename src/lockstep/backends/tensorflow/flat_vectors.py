"""The layout of a partial sum, whose flat vectors are in host memory and are added by numpy in one thread.

TensorFlow's own addition splits a vector over threads, some of which flush denormal numbers to zero while the calling
thread does not. Inside a graph, Grappler would reorder a tree of additions; additions on the host are in no graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lockstep.core import host_vectors
from lockstep.core.layout import Layout
from lockstep.core.metrics import FIRST_METRIC, Sums
from lockstep.core.shard_sums import NUM_CHECKS
from lockstep.core.types import PartialSum


def choose_sum_dtype(variable: Any) -> str:
    """Returns the dtype in which gradients of this variable are added: float64, float32, or int64 for integers."""
    dtype = tf.as_dtype(variable.dtype)
    if not dtype.is_floating:
        return "int64"
    return "float64" if dtype == tf.float64 else "float32"


def build_layout(trainable: Mapping[str, Any], statistics: Mapping[str, Any], room: int) -> Layout:
    """Returns the layout of a partial sum: first the gradients, then the running statistics.

    A shard's vector of sums also has an entry for each of these arrays, which says whether the shard has computed it,
    and the checks of `ShardNames`.
    """
    return Layout.build(
        [(name, choose_sum_dtype(variable), tuple(variable.shape)) for name, variable in trainable.items()],
        [(name, choose_sum_dtype(variable), tuple(variable.shape)) for name, variable in statistics.items()],
        FIRST_METRIC + room + len(trainable) + len(statistics) + NUM_CHECKS,
    )


def write_arrays(leaf: PartialSum, layout: Layout, arrays: Sequence[Any]) -> None:
    """Copies a shard's arrays into its partial sum; an array that is None counts as zeros."""
    for field, array in zip(layout.fields, arrays, strict=True):
        host_vectors.view(leaf, field)[...] = 0 if array is None else array


def read_present(layout: Layout, sums: Sums) -> list[bool]:
    """Returns for each array of a partial sum whether at least one shard has computed it."""
    return [bool(count) for count in sums[-len(layout.fields) - NUM_CHECKS : -NUM_CHECKS]]
