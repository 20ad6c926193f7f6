"""Abreast: the shards of every replica in one call into TensorFlow.

A call costs Python about as much as a layer costs TensorFlow, and meanwhile the cores wait.
So a step has one: TensorFlow's executor runs the replicas side by side, and the shards of a
replica in turn. The function around them holds calls, and what takes the rows apart for
them. The calls are never inlined: TensorFlow optimizes a shard's graph by itself, whatever
stands beside it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import tensorflow as tf

ALONE = {"_noinline": True}  # the attribute of a function that is optimized by itself


class Lane(NamedTuple):
    """The shards of one replica: where it computes, the variables it reads, and each shard's function."""

    place: Callable[[], AbstractContextManager[Any]]
    variables: Sequence[Any]
    shards: Sequence[Any]


def together(lanes: Sequence[Lane], pieces: Sequence[Any], *rows: Any) -> Any:
    """One function of every shard's piece, and of arrays with a row for each, that gives every shard's result.

    >>> from contextlib import nullcontext
    >>> def body(variables, piece, row):
    ...     return variables[0] * piece + row
    >>> shard = tf.function(body, autograph=False, experimental_attributes=ALONE)
    >>> lane = Lane(nullcontext, [tf.Variable(3)], [shard, shard])
    >>> pieces, rows = [tf.constant(index) for index in range(4)], tf.constant([10, 20, 30, 40])
    >>> [int(result) for result in together([lane, lane], pieces, rows)(pieces, rows)]
    [10, 23, 36, 49]
    """

    def every(pieces: Sequence[Any], *rows: Any) -> list[Any]:
        given = list(zip(pieces, *map(tf.unstack, rows), strict=True))
        results: list[Any] = []
        for lane in lanes:
            before: list[Any] = []
            for shard in lane.shards:
                with lane.place(), tf.control_dependencies(before):
                    results.append(shard(lane.variables, *given[len(results)]))
                before = [each for each in tf.nest.flatten(results[-1]) if tf.is_tensor(each)]
        return results

    return tf.function(every, autograph=False).get_concrete_function(pieces, *rows)
