"""Reads the shards' sums (loss, weight and metrics) from the devices, and checks the names of the metrics.

The sums are read after all programs of a step were started, so that no device waits for the host.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.jax.flat_vectors import VectorFields
from lockstep.backends.jax.shard_inputs import ShardBatch
from lockstep.backends.jax.shard_pass import TraceInfo
from lockstep.core.metrics import Column, Sums
from lockstep.core.outputs import Outputs, ShardOutputs
from lockstep.core.shard_sums import NUM_CHECKS, ShardNames, check_loss, pad
from lockstep.core.types import Work
from lockstep.errors import ModelError


class StartedShard(NamedTuple):
    """A shard whose program was started, with its sums and its outputs."""

    batch: ShardBatch
    values: tuple[Any, Outputs]  # the sums, and what metric objects or the next batch need
    info: TraceInfo


class SumsReader:
    """Reads sums, and checks that every shard of a command has the same metrics."""

    def __init__(self, outputs: ShardOutputs | None = None) -> None:
        self._outputs = outputs
        self._names = ShardNames()

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the shard whose sums were read last."""
        return self._names.columns

    def begin(self) -> None:
        """Drops the names of the previous command's metrics, because the next command may have other metrics."""
        self._names.begin()

    def read_shard(self, work: Work, started: StartedShard) -> NDArray[np.float64]:
        """Waits for a shard's sums and returns them in float64; stores the shard's outputs."""
        sums, outputs = started.values
        if self._outputs is not None:
            self._outputs.keep(work, started.batch.shard, outputs, started.batch.examples)
        self._names.add(started.info.columns)
        return np.asarray(sums, np.float64) * started.info.scales

    def read_step(self, work: Work, fields: VectorFields, shards: Sequence[StartedShard]) -> dict[int, Sums]:
        """Returns every shard's sums, padded to the layout's length; raises an error if a loss is not finite."""
        for each in shards:  # all copies are started before the first is waited for
            each.values[0].copy_to_host_async()
        rows = {}
        for each in sorted(shards, key=lambda started: started.batch.shard):
            shard, values = each.batch.shard, self.read_shard(work, each)
            check_loss(values, work.step, shard)
            rows[shard] = pad(values, fields.layout.num_sums, [*each.info.changed, *self._names.checks()])
        return rows

    def check(self, fields: VectorFields, sums: Sums) -> None:
        """Raises ModelError if shards of any process differ in their metrics or in the variables they changed."""
        self._names.check(sums)
        counts = _read_counts(sums, fields)
        in_some = (counts != 0) & (counts != sums[-1])  # the last entry is the number of shards
        if in_some.any():
            index = int(in_some.argmax())
            raise ModelError(
                f"The model's variable {fields.names[index]!r} changed in {int(counts[index])} of {int(sums[-1])} "
                "shards, but a variable must change in every shard or in none. Write to it in every call of the "
                "model, whatever the number of examples, which can differ by one between shards."
            )


def read_changed(sums: Sums, fields: VectorFields) -> tuple[bool, ...]:
    """Returns for each untrained variable of the model whether the shards of a step changed it."""
    return tuple(bool(count) for count in _read_counts(sums, fields))


def _read_counts(sums: Sums, fields: VectorFields) -> Sums:
    """Returns for each untrained variable in how many shards it changed; the counts stand before the checks."""
    return sums[-NUM_CHECKS - len(fields.names) : -NUM_CHECKS]
