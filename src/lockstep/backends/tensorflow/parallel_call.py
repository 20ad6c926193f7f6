"""Builds the function that computes the shards of every replica in one call into TensorFlow.

A call costs Python about as much time as a layer costs TensorFlow, and the cores wait meanwhile. So a step makes one
call, in which TensorFlow's executor runs the replicas in parallel and the shards of a replica one after the other. The
function contains only calls of the shards' functions, and operations that split the rows for them. The calls are never
inlined: TensorFlow optimizes a shard's graph alone, whatever else is in the call.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import tensorflow as tf

NOT_INLINED = {"_noinline": True}  # the attributes of a function that TensorFlow must optimize alone


class ReplicaCalls(NamedTuple):
    """The calls of one replica: where it computes, the variables it reads, and each shard's function."""

    place: Callable[[], AbstractContextManager[Any]]
    variables: Sequence[Any]
    functions: Sequence[Any]


def build_call(replicas: Sequence[ReplicaCalls], pieces: Sequence[Any], *rows: Any) -> Any:
    """Returns one function that computes the results of all shards.

    The function takes every shard's piece, and arrays with a row for each shard, like the arguments given here.

    >>> from contextlib import nullcontext
    >>> def body(variables, piece, row):
    ...     return variables[0] * piece + row
    >>> shard = tf.function(body, autograph=False, experimental_attributes=NOT_INLINED)
    >>> replica = ReplicaCalls(nullcontext, [tf.Variable(3)], [shard, shard])
    >>> pieces, rows = [tf.constant(index) for index in range(4)], tf.constant([10, 20, 30, 40])
    >>> [int(result) for result in build_call([replica, replica], pieces, rows)(pieces, rows)]
    [10, 23, 36, 49]
    """

    def call_all(pieces: Sequence[Any], *rows: Any) -> list[Any]:
        given = list(zip(pieces, *map(tf.unstack, rows), strict=True))
        results: list[Any] = []
        for replica in replicas:
            before: list[Any] = []
            for function in replica.functions:
                # Without this dependency the executor would run a replica's shards in parallel, too.
                with replica.place(), tf.control_dependencies(before):
                    results.append(function(replica.variables, *given[len(results)]))
                before = [each for each in tf.nest.flatten(results[-1]) if tf.is_tensor(each)]
        return results

    return tf.function(call_all, autograph=False).get_concrete_function(pieces, *rows)
