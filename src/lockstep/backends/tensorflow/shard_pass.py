"""The forward and backward pass of one shard, as one TensorFlow function.

A function is traced for the shard's own shape. It does not depend on the other shards or on the number of replicas: the
graph that computes a shard, and so each choice that Grappler makes, is the same in every process. The variables are
arguments, so every replica uses the same trace.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lockstep.backends.tensorflow import array_ops, unsupported
from lockstep.backends.tensorflow.device_variables import DeviceVariables
from lockstep.backends.tensorflow.flat_vectors import choose_sum_dtype
from lockstep.backends.tensorflow.parallel_call import NOT_INLINED, ReplicaCalls, build_call
from lockstep.backends.tensorflow.training_program import ReplicaVariables, TrainingProgram
from lockstep.core import seeds
from lockstep.core.batches import leaves, transform
from lockstep.core.metrics import Column, Sums
from lockstep.core.outputs import Outputs
from lockstep.core.shard_sums import ShardNames
from lockstep.core.target_kind import Labels, check_labels
from lockstep.core.types import Work
from lockstep.core.weighing import Share


class ShardGradients(NamedTuple):
    """What the function of one shard returns in training."""

    gradients: Sequence[Any]  # for every trainable variable; None if the loss does not depend on the variable
    statistics: Sequence[Any]  # the running statistics; None for a statistic that the shard did not change
    sums: Any
    contributes: Any  # whether the shard has a loss at all, as a tensor
    outputs: Outputs = Outputs()  # for metric objects and the next batch


class ShardLeaf(NamedTuple):
    """A shard's gradients, running statistics and sums, copied to the host."""

    arrays: Sequence[Any]  # the gradients, then the running statistics; None for what the shard does not have
    sums: Sums
    outputs: Outputs


@dataclass
class TensorflowTraceInfo:
    """What tracing a shard's function finds about the loss and the metrics."""

    columns: Sequence[Column] = ()
    labels: Labels | None = None  # the valid labels, if the targets are labels


class ShardCall(NamedTuple):
    """One call of a shard's function: the function, and its arguments besides the variables."""

    shard: int
    function: Any
    tensors: Sequence[Any]
    seeds: Any
    fraction: float  # of the batch's examples


class TensorflowShardRunner:
    """Traces a function for each shard of a program, and computes the shards of all replicas in one call."""

    def __init__(self, program: TrainingProgram, devices: Sequence[str], exact: bool) -> None:
        self._program = program
        self._exact = exact
        self._traces: dict[Any, Any] = {}  # functions that compute one shard, by all that a trace depends on
        self.names = ShardNames()
        self.spread(devices)

    def spread(self, devices: Sequence[str]) -> None:
        """Puts a replica on each of the devices."""
        self.variables = DeviceVariables(devices)
        self._functions: dict[Any, Any] = {}  # functions that compute the shards of all replicas

    def compute_gradients(self, work: Work, own: ReplicaVariables) -> Iterator[tuple[int, ShardLeaf]]:
        """Yields every shard's number, and its gradients, running statistics and sums."""
        self.names.begin()
        results = self._run(work, own, self._compute_gradients)
        return ((shard, _copy_to_host(found, first=shard == 0)) for shard, found in results)

    def evaluate(self, work: Work, own: ReplicaVariables) -> Iterator[tuple[int, tuple[Any, Outputs]]]:
        """Yields every shard's sums and outputs, computed in evaluation mode."""
        self.names.begin()
        return ((shard, (np.array(sums), outputs)) for shard, (sums, outputs) in self._run(work, own, self._evaluate))

    def predict(self, work: Work, own: ReplicaVariables) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs in evaluation mode."""
        return self._run(work, own, self._predict)

    def _run(self, work: Work, own: ReplicaVariables, body: Any) -> Iterator[tuple[int, Any]]:
        """Computes the shards of every replica in one call; yields (shard, result)."""
        replicas = [
            [self._create_call(work, shard, piece, own, body) for shard, piece in pieces.items()]
            for pieces in work.pieces.values()
        ]
        calls = [call for replica in replicas for call in replica]
        if not calls:
            return iter(())
        rows = tf.constant(np.array([call.seeds for call in calls]))
        fractions = tf.constant([call.fraction for call in calls], tf.float64)
        given = [call.tensors for call in calls], rows, fractions
        run = self._find_function(replicas, self.variables.synchronize(own), given)
        try:
            results = run(*given)
        except Exception as error:
            # TensorFlow's error does not name the shard, so each shard is computed again alone until one fails.
            for call, *arguments in zip(calls, *given, strict=True):
                if _fails_alone(call, own, arguments):
                    error.add_note(f"In shard {call.shard} of step {work.step}.")
                    break
            raise
        return zip((call.shard for call in calls), results, strict=True)

    def _find_function(
        self, replicas: Sequence[Sequence[ShardCall]], variables: Sequence[ReplicaVariables], given: Any
    ) -> Any:
        """Returns the function that computes each replica's shards on its device; builds it on first use."""
        # By ids, which no other functions can get, because `_traces` stores the functions.
        key = tuple(tuple(id(call.function) for call in calls) for calls in replicas)
        if key not in self._functions:
            parts = [
                ReplicaCalls(partial(self.variables.place, index), read.all, [call.function for call in calls])
                for index, (read, calls) in enumerate(zip(variables, replicas, strict=True))
            ]
            self._functions[key] = build_call(parts, *given)
        return self._functions[key]

    def _create_call(self, work: Work, shard: int, piece: Any, own: ReplicaVariables, body: Any) -> ShardCall:
        """Returns the call of the shard's function; traces the function if no trace fits."""
        examples = work.count(shard)
        alone = work.num_shards == 1
        tensors = [_to_tensor(value) for value in leaves(piece) if not _is_static(value)]
        rows, fraction = self._derive_seeds(work, shard), examples / work.num_examples
        variables = len(own.trainable), *map(id, own.all)
        # A constant in the trace, unlike a dynamic scale, which is a variable.
        scale = getattr(self._program.optimizer, "loss_scale_factor", None)
        program = self._program.room, self._program.trace_key, scale
        key = body.__name__, alone, work.summed, variables, program, repr(transform(piece, _describe))
        if key not in self._traces:
            info = TensorflowTraceInfo()

            def compute(variables: Any, given: Any, rows: Any, fraction: Any) -> Any:
                read = ReplicaVariables(variables[: len(own.trainable)], variables[len(own.trainable) :])
                share = Share(examples, fraction, alone, work.summed)
                return body(read, _replace_tensors(piece, given), rows, share, info)

            function = _trace(compute, (own.all, tensors, tf.constant(rows), tf.constant(fraction, tf.float64)))
            unsupported.check_graph(function.graph, self._exact)
            self._traces[key] = function, info, own  # the variables, too, so that no others get their ids
        function, info, _ = self._traces[key]
        if body != self._predict:
            self.names.add(info.columns)
        if info.labels is not None:  # on a GPU, TensorFlow gives NaN for a label outside the classes
            weights = [np.asarray(each) for each in piece[2:3] if each is not None]
            for targets in leaves(piece[1]):
                check_labels(np.asarray(targets), *info.labels, *weights)
        return ShardCall(shard, function, tensors, rows, fraction)

    def _compute_gradients(
        self, own: ReplicaVariables, batch: Any, rows: Any, share: Share, info: TensorflowTraceInfo
    ) -> ShardGradients:
        """Computes one shard in training mode; called in a traced function, as are the next two methods."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(own.trainable)
            result = self._program.compute(own, batch, share, rows, training=True)
            term = result.term
            root = self._program.optimizer.scale_loss(term.root)
        gradients = tape.gradient(root, own.trainable)
        info.columns, info.labels = result.columns, term.labels
        statistics = [
            # By identity: a program returns the variable itself for a statistic that the shard did not change.
            None if after is before else _weigh_statistic(after, share)
            for before, after in zip(own.statistics, result.statistics, strict=True)
        ]
        dense = [None if each is None else _to_dense(each, term.gradient_factor) for each in gradients]
        sums = array_ops.join(result.parts)
        return ShardGradients(dense, statistics, sums, tf.convert_to_tensor(term.contributes), result.outputs)

    def _evaluate(self, own: ReplicaVariables, batch: Any, rows: Any, share: Share, info: TensorflowTraceInfo) -> Any:
        """Computes one shard's sums in evaluation mode."""
        result = self._program.compute(own, batch, share._replace(alone=False), rows, training=False)
        info.columns, info.labels = result.columns, result.term.labels
        return array_ops.join(result.parts), result.outputs

    def _predict(self, own: ReplicaVariables, inputs: Any, rows: Any, share: Share, info: TensorflowTraceInfo) -> Any:
        """Computes one shard's outputs in evaluation mode."""
        return self._program.predict(own, inputs, rows)

    def _derive_seeds(self, work: Work, shard: int) -> Any:
        """Returns a row of two integers for every random number generator, from (seed, step, shard) alone."""
        first = seeds.shard(work.seed, work.step, shard)
        rows = [seeds.derive("generator", first, index) for index in range(self._program.num_seeds)]
        return np.array([[row & 0x7FFFFFFF, row >> 32] for row in rows], np.int32).reshape(-1, 2)


def _copy_to_host(found: ShardGradients, first: bool) -> ShardLeaf:
    """Copies a shard's result to the host; a shard without a loss has no gradients, even if TensorFlow computed NaN.

    Statistics that are integers are not averaged: those of shard 0 are used, and all other shards give zeros.
    """
    gradients = found.gradients if found.contributes else [None] * len(found.gradients)
    statistics = [
        each if each is None or first or each.dtype.is_floating else np.zeros(each.shape) for each in found.statistics
    ]
    arrays = [None if each is None else np.asarray(each) for each in (*gradients, *statistics)]
    return ShardLeaf(arrays, np.array(found.sums), found.outputs)


def _trace(body: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Traces a shard's function; raises ExactError for an operation that draws from the global generator."""
    try:
        function = tf.function(body, autograph=False, experimental_attributes=NOT_INLINED)
        return function.get_concrete_function(*given)
    except RuntimeError as error:
        if "Random ops require a seed" in str(error):
            raise unsupported.create_random_error("a random operation") from error
        raise


def _fails_alone(call: ShardCall, own: ReplicaVariables, arguments: Sequence[Any]) -> bool:
    """Returns whether the shard also fails when it is computed alone; a shard writes nothing, so it can be repeated."""
    try:
        call.function(own.all, *arguments)
    except Exception:
        return True
    return False


def _is_static(value: Any) -> bool:
    """Returns whether a value of a shard's batch is a constant in the trace."""
    return value is None or isinstance(value, str | bool)


def _describe(value: Any) -> Any:
    """Returns what a trace depends on: a static value itself, or an array's dtype and shape."""
    if _is_static(value):
        return value
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape
    tensor = _to_tensor(value)
    return tensor.dtype.name, tuple(tensor.shape)


def _to_tensor(value: Any) -> Any:
    """Returns a tensor in its own memory, aligned to a cache line."""
    return tf.convert_to_tensor(value)


def _replace_tensors(piece: Any, tensors: Sequence[Any]) -> Any:
    """Returns `piece` with these tensors instead of its arrays."""
    given = iter(tensors)
    return transform(piece, lambda value: value if _is_static(value) else next(given))


def _to_dense(gradient: Any, factor: Any) -> Any:
    """Returns a dense gradient in the dtype in which it is added, multiplied by `factor` if it is given."""
    dense = tf.convert_to_tensor(gradient)
    dense = tf.cast(dense, choose_sum_dtype(dense))
    return dense if factor is None else dense * tf.cast(factor, dense.dtype)


def _weigh_statistic(value: Any, share: Share) -> Any:
    """Returns a running statistic in the dtype in which it is added; multiplies floats by the shard's fraction."""
    value = tf.cast(value, choose_sum_dtype(value))
    return value if share.alone or not value.dtype.is_floating else value * tf.cast(share.fraction, value.dtype)
