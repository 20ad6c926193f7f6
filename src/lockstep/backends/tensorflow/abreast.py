"""Abreast: the shards of every replica in one call into TensorFlow.

A call costs Python about as much as a layer costs TensorFlow, and meanwhile the cores wait.
So a step has one: TensorFlow's executor runs the replicas side by side, and the shards of a
replica in turn. The function around them holds calls and nothing else, and these are never
inlined: TensorFlow optimizes a shard's graph by itself, whatever stands beside it.
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


def together(lanes: Sequence[Lane], given: Sequence[tuple[Any, ...]]) -> Any:
    """One function of every shard's arguments that gives every shard's results, lane after lane.

    >>> from contextlib import nullcontext
    >>> variable, one = tf.Variable(3.0), tf.constant(1.0)
    >>> shard = tf.function(lambda variables, x: variables[0] * x, autograph=False, experimental_attributes=ALONE)
    >>> lane = Lane(nullcontext, [variable], [shard, shard])
    >>> [float(each) for each in together([lane, lane], [(one,)] * 4)([(one,), (2 * one,), (3 * one,), (4 * one,)])]
    [3.0, 6.0, 9.0, 12.0]
    """

    def every(given: Sequence[tuple[Any, ...]]) -> list[Any]:
        results: list[Any] = []
        for lane in lanes:
            before: list[Any] = []
            for shard in lane.shards:
                with lane.place(), tf.control_dependencies(before):
                    results.append(shard(lane.variables, *given[len(results)]))
                before = [each for each in tf.nest.flatten(results[-1]) if tf.is_tensor(each)]
        return results

    return tf.function(every, autograph=False).get_concrete_function(given)
