"""Runs the shards of one command (step, evaluation or prediction) on their devices.

All shards are started before a result is waited for. Shards run in rounds, with one shard on each device. The whole
step of a batch with one shard is one program, because nothing is added and only one device computes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.backends.jax import rng
from lockstep.backends.jax.flat_vectors import VectorFields
from lockstep.backends.jax.partial_sums import DeviceSum, Leaves
from lockstep.backends.jax.replicas import JaxReplicas
from lockstep.backends.jax.shard_inputs import ShardBatch, iterate_rounds
from lockstep.backends.jax.shard_pass import ShardPasses, TraceInfo
from lockstep.backends.jax.sums_reader import StartedShard, SumsReader
from lockstep.core.batches import leaves
from lockstep.core.metrics import Sums
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardSums
from lockstep.core.target_kind import check_labels
from lockstep.core.types import Work


class JaxShardRunner:
    """Runs forward and backward passes of shards with the state of the replicas."""

    def __init__(self, replicas: JaxReplicas, passes: ShardPasses, outputs: ShardOutputs | None = None) -> None:
        self.passes = passes
        self.reader = SumsReader(outputs)
        self.info: TraceInfo | None = None  # of the shard that was started last
        self._replicas = replicas
        self._last_sum: DeviceSum | None = None  # of the last step, if it was one program

    def start_shards(self, work: Work, fields: VectorFields) -> tuple[Leaves, ShardSums]:
        """Starts every shard; returns their partial sums and sums, which the devices are still computing."""
        self.reader.begin()
        partial_sums, started = Leaves(), []
        alone = work.num_shards == 1
        for index, batches in enumerate(iterate_rounds(self._collect_pieces(work))):
            vectors: list[Any] = [None] * len(batches)
            for row, batch in enumerate(batches):
                if batch is not None:
                    find_gradient = self._replicas.executables.find_gradient
                    run, self.info = find_gradient(self.passes, batch, alone, work.summed, fields)
                    share = self._replicas.to_scalar(batch.examples / work.num_examples)
                    vectors[row], values = self._run(run, row, batch, work, share, np.asarray(batch.shard == 0))
                    _check_labels(self.info, batch)
                    started.append(StartedShard(batch, values, self.info))
                    partial_sums.places[batch.shard] = index, row
            partial_sums.rounds.append(vectors)
        return partial_sums, self._defer_reading(work, fields, started)

    def start_step(self, work: Work, fields: VectorFields, clip: float | None) -> tuple[DeviceSum, ShardSums]:
        """Starts the whole step of a batch with one shard; its gradient is computed only if it is read."""
        self.reader.begin()
        ((_, batch),) = self._iterate_batches(work)
        executables = self._replicas.executables
        params, rest, state = self._replicas.copies[0]
        key = rng.derive_shard_key(work, batch.shard)
        run, leaf, info = executables.find_step(self.passes, batch, work.summed, fields, self._replicas.optimizer, clip)
        sums, arrays, *after = run(0, params, rest, state, batch.arrays, key)
        _check_labels(info, batch)

        def compute_gradient() -> Any:
            # The present optimizer state will do, because the gradient does not depend on it. To keep that of the step
            # would cost memory.
            state = self._replicas.copies[0][2]
            return leaf(0, params, rest, state, arrays, key)

        # The assignment frees the previous step's arrays, which takes time if they are many. So it comes after this
        # step's program was started, while the device computes.
        self._last_sum = DeviceSum(fields.layout, compute_gradient, [tuple(after)])
        return self._last_sum, self._defer_reading(work, fields, [StartedShard(batch, sums, info)])

    def _defer_reading(self, work: Work, fields: VectorFields, started: list[StartedShard]) -> ShardSums:
        """Returns the shards' sums, which wait for the devices when they are read."""
        return ShardSums(partial(self.reader.read_step, work, fields, started), partial(self.reader.check, fields))

    def evaluate(self, work: Work) -> Iterator[tuple[int, Sums]]:
        """Yields each shard's loss and metrics, computed in evaluation mode without an update."""
        started = []
        self.reader.begin()
        for row, batch in self._iterate_batches(work):
            run, info = self._replicas.executables.find_sums(self.passes, batch, work.summed)
            share = self._replicas.to_scalar(batch.examples / work.num_examples)
            started.append(StartedShard(batch, self._run(run, row, batch, work, share), info))
            _check_labels(info, batch)
        for each in started:
            yield each.batch.shard, self.reader.read_shard(work, each)

    def forward(self, work: Work) -> Iterator[tuple[int, Any]]:
        """Yields each shard's outputs, computed in evaluation mode without an update."""
        started = []
        for row, batch in self._iterate_batches(work):
            outputs = self._run(self._replicas.executables.find_outputs(self.passes, batch.spec), row, batch, work)
            started.append((batch.shard, outputs))
        yield from started

    def _collect_pieces(self, work: Work) -> list[dict[int, Any]]:
        """Returns for every device the shards of all replicas on it."""
        result: list[dict[int, Any]] = [{} for _ in set(self._replicas.rows)]
        rows = self._replicas.rows
        for replica, pieces in work.pieces.items():  # replica numbers count the replicas of all processes
            result[rows[replica % len(rows)]].update(pieces)
        return result

    def _iterate_batches(self, work: Work) -> Iterator[tuple[int, ShardBatch]]:
        """Yields every shard with the row of its device, round by round."""
        for batches in iterate_rounds(self._collect_pieces(work)):
            yield from ((row, batch) for row, batch in enumerate(batches) if batch is not None)

    def _run(self, program: Any, row: int, batch: ShardBatch, work: Work, *more: Any) -> Any:
        """Runs one shard on the device of its row.

        The shard's arrays are on the host, because the program copies them in a fraction of the time that `device_put`
        takes. It reads aligned arrays in place and others from a copy, and has read all of them when the step ends, so
        the script may then change them.
        """
        params, rest, _ = self._replicas.copies[row]
        return program(row, params, rest, batch.arrays, rng.derive_shard_key(work, batch.shard), *more)


def _check_labels(info: TraceInfo, batch: ShardBatch) -> None:
    """Raises an error if a label is outside the classes; called while the device computes the shard's result."""
    if info.labels is not None:
        _, labels, *weights = batch.spec.unflatten(batch.arrays)
        for each in leaves(labels):
            check_labels(each, *info.labels, *weights)
