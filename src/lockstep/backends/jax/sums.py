"""Sums on the host: what the shards of a command have added up, and by which names.

They are read once every round of a step has been started, so that no device waits
for the host.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.jax.fields import Fields
from lockstep.backends.jax.shards import Found
from lockstep.core.metrics import FIRST_METRIC, LOSS, Column, Sums
from lockstep.errors import ModelError, NonFiniteError


class Reader:
    """Reads sums, and sees to it that every shard of a command names the same metrics."""

    def __init__(self) -> None:
        self.columns: Sequence[Column] = []
        self._named = False  # whether a shard of this command has named its metrics

    def begin(self) -> None:
        """A new command, which may name other metrics."""
        self._named = False

    def read(self, sums: Any, found: Found) -> NDArray[np.float64]:
        """The sums of a shard in float64; waits for them."""
        if self._named and _names(found.columns) != _names(self.columns):
            raise _other_names(found.columns)
        self.columns, self._named = found.columns, True
        return np.asarray(sums, np.float64) * found.scales

    def step(self, step: int, fields: Fields, shard: int, sums: Any, found: Found) -> Sums:
        """The sums of a shard as a layout has them, with what `check` reads at the end; a loss must be finite."""
        values = self.read(sums, found)
        if not np.isfinite(values[LOSS]):
            raise NonFiniteError.at(step, shard, float(values[LOSS]))
        size = fields.layout.fields[-1].size
        room = size - len(fields.names) - 2
        if len(values) > room:
            raise ModelError(
                f"The metrics of a step give at most {room - FIRST_METRIC} sums. Got "
                f"{len(values) - FIRST_METRIC}. Give fewer, or more than one lockstep.Metric."
            )
        result = np.zeros(size)
        result[: len(values)] = values
        result[room:] = *found.changed, self._checksum(), 1.0
        return result

    def check(self, sums: Sums, fields: Fields) -> None:
        """Raises where shards, also of other processes, differ in their metrics or in what they have changed."""
        if self._named and sums[-2] != self._checksum() * sums[-1]:
            raise _other_names(self.columns)
        for name, count in zip(fields.names, _counts(sums, fields), strict=True):
            if count not in (0, sums[-1]):
                raise ModelError(
                    f"A model changes the same variables in every shard. Got {name!r} changed in {int(count)} of "
                    f"{int(sums[-1])}. Do not let it follow from the number of examples, which differs by one."
                )

    def _checksum(self) -> int:
        return zlib.crc32("\n".join(_names(self.columns)).encode())


def changed(sums: Sums, fields: Fields) -> tuple[bool, ...]:
    """For each of the model's other variables, whether the shards of a step have changed it."""
    return tuple(bool(count) for count in _counts(sums, fields))


def _counts(sums: Sums, fields: Fields) -> Sums:
    return sums[-2 - len(fields.names) : -2]


def _names(columns: Sequence[Column]) -> list[str]:
    return [column.name for column in columns]


def _other_names(columns: Sequence[Column]) -> ModelError:
    return ModelError(
        "An objective gives the same metrics for every shard. "
        f"Got {_names(columns)} in one and others in another. Return every name every time."
    )
