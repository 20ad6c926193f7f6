"""Shards: one shard's forward and backward pass, and the leaf it leaves behind.

Each is one TensorFlow function, traced for the shard's own shape and knowing nothing of
the other shards or of the number of replicas: the graph that computes a shard, and with
it Grappler's every choice, is the same whoever runs it. The variables are its arguments,
so one trace serves every replica.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lockstep.backends.base import Work
from lockstep.backends.tensorflow import array_ops, parallel_call, unsupported
from lockstep.backends.tensorflow.flat_vectors import accumulated
from lockstep.backends.tensorflow.program import Copy, Program
from lockstep.backends.tensorflow.replicas import Replicas
from lockstep.core import seeds
from lockstep.core.batches import count, leaves, transform
from lockstep.core.metrics import Column
from lockstep.core.shard_sums import ShardNames
from lockstep.core.target_kind import Labels, check_labels
from lockstep.core.weighing import Share


class Leaf(NamedTuple):
    """What a shard gives: a gradient for every trained variable, the running statistics, and the sums."""

    gradients: Sequence[Any]  # None where the loss does not depend on the variable
    kept: Sequence[Any]  # None where nothing changed
    sums: Any
    contributes: Any  # whether the shard has a loss at all
    pair: Any = None  # outputs and targets, where metric objects need them


@dataclass
class Found:
    """What tracing a shard has shown."""

    columns: Sequence[Column] = ()
    labels: Labels | None = None  # what the targets may be, if they are labels


class Task(NamedTuple):
    """A shard ready to run: its function, and what that takes besides the variables."""

    shard: int
    traced: Any
    tensors: Sequence[Any]
    drawn: Any
    fraction: float


class Shards:
    """Traces the shards of a program, and runs those of all replicas in one call."""

    def __init__(self, program: Program, devices: Sequence[str], exact: bool) -> None:
        self._program = program
        self._exact = exact
        self._traces: dict[Any, Any] = {}  # of one shard
        self.names = ShardNames()
        self.spread(devices)

    def spread(self, devices: Sequence[str]) -> None:
        """Puts a replica on each of the devices."""
        self.replicas = Replicas(devices)
        self._calls: dict[Any, Any] = {}  # of all replicas' shards

    def leaves(self, work: Work, own: Copy) -> Iterator[tuple[int, Leaf]]:
        """Every shard's leaf, on the host."""
        self.names.begin()
        return ((shard, _finished(leaf)) for shard, leaf in self._run(work, own, self._leaf))

    def sums(self, work: Work, own: Copy) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """Every shard's sums without training, and its outputs and targets where metric objects need them."""
        self.names.begin()
        return ((shard, (np.array(sums), pair)) for shard, (sums, pair) in self._run(work, own, self._sums))

    def outputs(self, work: Work, own: Copy) -> Iterator[tuple[int, Any]]:
        """Every shard's outputs, without training."""
        return self._run(work, own, self._outputs)

    def _run(self, work: Work, own: Copy, body: Any) -> Iterator[tuple[int, Any]]:
        """(shard, result) for the shards of every replica, computed in one call."""
        lanes = [
            [self._task(work, shard, piece, own, body) for shard, piece in pieces.items()]
            for pieces in work.pieces.values()
        ]
        tasks = [task for lane in lanes for task in lane]
        if not tasks:
            return iter(())
        drawn = tf.constant(np.array([task.drawn for task in tasks]))
        fractions = tf.constant([task.fraction for task in tasks], tf.float64)
        given = [task.tensors for task in tasks], drawn, fractions
        call = self._call(lanes, self.replicas.copies(own), given)
        try:
            results = call(*given)
        except Exception as error:
            for task, *each in zip(tasks, *given, strict=True):
                if _fails(task, own, each):
                    error.add_note(f"In shard {task.shard} of step {work.step}.")
                    break
            raise
        return zip((task.shard for task in tasks), results, strict=True)

    def _call(self, lanes: Sequence[Sequence[Task]], copies: Sequence[Copy], given: Any) -> Any:
        """The function that runs them, lane by lane, on the replicas."""
        key = tuple(tuple(id(task.traced) for task in lane) for lane in lanes)
        if key not in self._calls:
            self._calls[key] = parallel_call.together(
                [
                    parallel_call.Lane(partial(self.replicas.place, replica), copy.all, [task.traced for task in lane])
                    for replica, (copy, lane) in enumerate(zip(copies, lanes, strict=True))
                ],
                *given,
            )
        return self._calls[key]

    def _task(self, work: Work, shard: int, piece: Any, own: Copy, body: Any) -> Task:
        """The shard's function, traced where there is none yet, and what it is given."""
        examples = count(piece)
        alone = work.num_shards == 1
        tensors = [_tensor(value) for value in leaves(piece) if not _static(value)]
        drawn, fraction = self._seeds(work, shard), examples / work.num_examples
        variables = len(own.trained), *map(id, own.all)
        scale = getattr(self._program.optimizer, "loss_scale_factor", None)
        program = self._program.room, self._program.form, scale
        key = body.__name__, alone, work.summed, variables, program, repr(transform(piece, _signature))
        if key not in self._traces:
            found = Found()

            def traced_body(variables: Any, given: Any, drawn: Any, fraction: Any) -> Any:
                copy = Copy(variables[: len(own.trained)], variables[len(own.trained) :])
                return body(copy, _rebuilt(piece, given), drawn, Share(examples, fraction, alone, work.summed), found)

            traced = _trace(traced_body, (own.all, tensors, tf.constant(drawn), tf.constant(fraction, tf.float64)))
            unsupported.check_graph(traced.graph, self._exact)
            self._traces[key] = traced, found, own  # held, so that their ids stay theirs
        traced, found, _ = self._traces[key]
        if body != self._outputs:
            self.names.add(found.columns)
        if found.labels is not None:  # a GPU gives NaN for one outside the classes
            weights = [np.asarray(each) for each in piece[2:3] if each is not None]
            for targets in leaves(piece[1]):
                check_labels(np.asarray(targets), *found.labels, *weights)
        return Task(shard, traced, tensors, drawn, fraction)

    def _leaf(self, own: Copy, batch: Any, drawn: Any, share: Share, found: Found) -> Leaf:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(own.trained)
            outcome = self._program.compute(own, batch, share, drawn, training=True)
            term = outcome.term
            root = self._program.optimizer.scale_loss(term.root)
        gradients = tape.gradient(root, own.trained)
        found.columns, found.labels = outcome.columns, term.labels
        kept = [
            None if after is before else _weighed(after, share)
            for before, after in zip(own.kept, outcome.kept, strict=True)
        ]
        dense = [None if each is None else _dense(each, term.gradient_factor) for each in gradients]
        sums = array_ops.join(outcome.parts)
        return Leaf(dense, kept, sums, tf.convert_to_tensor(term.contributes), outcome.pair)

    def _sums(self, own: Copy, batch: Any, drawn: Any, share: Share, found: Found) -> Any:
        outcome = self._program.compute(own, batch, share._replace(alone=False), drawn, training=False)
        found.columns, found.labels = outcome.columns, outcome.term.labels
        return array_ops.join(outcome.parts), outcome.pair

    def _outputs(self, own: Copy, inputs: Any, drawn: Any, share: Share, found: Found) -> Any:
        return self._program.outputs(own, inputs, drawn)

    def _seeds(self, work: Work, shard: int) -> Any:
        """A row of two numbers for every generator, out of (seed, step, shard) alone."""
        first = seeds.shard(work.seed, work.step, shard)
        rows = [seeds.derive("generator", first, index) for index in range(self._program.num_seeds)]
        return np.array([[row & 0x7FFFFFFF, row >> 32] for row in rows], np.int32).reshape(-1, 2)


def _finished(leaf: Leaf) -> Leaf:
    """The leaf on the host; a shard without a loss gives exact zeros, also if its gradient is NaN."""
    gradients = [None if each is None else np.asarray(each) for each in leaf.gradients]
    if not leaf.contributes:
        gradients = [None for _ in gradients]
    kept = [None if each is None else np.asarray(each) for each in leaf.kept]
    return leaf._replace(gradients=gradients, kept=kept, sums=np.array(leaf.sums))


def _trace(body: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    try:
        return tf.function(body, autograph=False, experimental_attributes=parallel_call.ALONE).get_concrete_function(
            *given
        )
    except RuntimeError as error:
        if "Random ops require a seed" in str(error):
            raise unsupported.draws("a random operation") from error
        raise


def _fails(task: Task, own: Copy, given: Sequence[Any]) -> bool:
    """Whether the shard fails alone as well; it writes nothing, so it can be computed again."""
    try:
        task.traced(own.all, *given)
    except Exception:
        return True
    return False


def _static(value: Any) -> bool:
    return value is None or isinstance(value, str | bool)


def _signature(value: Any) -> Any:
    if _static(value):
        return value
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape
    tensor = _tensor(value)
    return tensor.dtype.name, tuple(tensor.shape)


def _tensor(value: Any) -> Any:
    """A tensor in memory of its own that starts at a cache line."""
    return tf.convert_to_tensor(value)


def _rebuilt(piece: Any, tensors: Sequence[Any]) -> Any:
    """The nest of `piece` with the tensors in their places."""
    given = iter(tensors)
    return transform(piece, lambda value: value if _static(value) else next(given))


def _dense(gradient: Any, factor: Any) -> Any:
    """A gradient in the type in which it is added, and times what its loss could not be multiplied by."""
    dense = tf.convert_to_tensor(gradient)
    dense = tf.cast(dense, accumulated(dense))
    return dense if factor is None else dense * tf.cast(factor, dense.dtype)


def _weighed(value: Any, share: Share) -> Any:
    """A running statistic in the type in which it is added, in its shard's share; whole numbers stay as they are."""
    value = tf.cast(value, accumulated(value))
    return value if share.alone or not value.dtype.is_floating else value * tf.cast(share.fraction, value.dtype)
