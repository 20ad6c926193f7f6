"""Sums on the host: what the shards of a command have added up, and by which names.

They are read once every round of a step has been started, so that no device waits
for the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Work
from lockstep.backends.jax.batches import Place
from lockstep.backends.jax.shards import Found
from lockstep.backends.jax.vector_fields import Fields
from lockstep.core.metrics import Column, Sums
from lockstep.core.outputs import ShardOutputs
from lockstep.core.shard_sums import ShardNames, check_loss, pad
from lockstep.errors import ModelError


class Reader:
    """Reads sums, and sees to it that every shard of a command names the same metrics."""

    def __init__(self, outputs: ShardOutputs | None = None) -> None:
        self._outputs = outputs
        self._names = ShardNames()

    @property
    def columns(self) -> Sequence[Column]:
        """The metrics of the last shard read."""
        return self._names.columns

    def begin(self) -> None:
        """A new command, which may name other metrics."""
        self._names.begin()

    def read(self, work: Work, place: Place, values: Any, found: Found) -> NDArray[np.float64]:
        """The sums of a shard in float64; waits for them, and keeps its outputs where these are wanted."""
        sums, pair = values
        if pair is not None and self._outputs is not None:
            outputs, targets = pair
            self._outputs.keep(work, place.shard, outputs, targets, place.examples)
        self._names.add(found.columns)
        return np.asarray(sums, np.float64) * found.scales

    def step(self, work: Work, fields: Fields, place: Place, sums: Any, found: Found) -> Sums:
        """The sums of a shard as a layout has them, with what `check` reads at the end; a loss must be finite."""
        values = self.read(work, place, sums, found)
        check_loss(values, work.step, place.shard)
        return pad(values, fields.layout.fields[-1].size, [*found.changed, *self._names.checks()])

    def check(self, sums: Sums, fields: Fields) -> None:
        """Raises where shards, also of other processes, differ in their metrics or in what they have changed."""
        self._names.check(sums)
        counts = _counts(sums, fields)
        some = (counts != 0) & (counts != sums[-1])
        if some.any():
            index = int(some.argmax())
            raise ModelError(
                f"A model changes the same variables in every shard. Got {fields.names[index]!r} changed in "
                f"{int(counts[index])} of {int(sums[-1])}. Do not let it follow from the number of examples, which "
                "differs by one."
            )


def changed(sums: Sums, fields: Fields) -> tuple[bool, ...]:
    """For each of the model's other variables, whether the shards of a step have changed it."""
    return tuple(bool(count) for count in _counts(sums, fields))


def _counts(sums: Sums, fields: Fields) -> Sums:
    return sums[-2 - len(fields.names) : -2]
