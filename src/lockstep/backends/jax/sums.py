"""Sums on the host: what the shards of a command have added up, and by which names.

They are read once every round of a step has been started, so that no device waits
for the host.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.jax.shards import Found
from lockstep.core.layout import Layout
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

    def step(self, step: int, layout: Layout, shard: int, sums: Any, found: Found) -> Sums:
        """The sums of a shard as a layout has them, the names' checksum at the end; a loss must be finite."""
        values = self.read(sums, found)
        if not np.isfinite(values[LOSS]):
            raise NonFiniteError.at(step, shard, float(values[LOSS]))
        size = layout.fields[-1].size
        if len(values) > size - 2:
            raise ModelError(
                f"The metrics of a step give at most {size - 2 - FIRST_METRIC} sums. Got "
                f"{len(values) - FIRST_METRIC}. Give fewer, or more than one lockstep.Metric."
            )
        result = np.zeros(size)
        result[: len(values)] = values
        result[-2:] = self._checksum(), 1.0
        return result

    def check(self, sums: Sums) -> None:
        """Raises where a shard of another process has named its metrics otherwise."""
        if self._named and sums[-2] != self._checksum() * sums[-1]:
            raise _other_names(self.columns)

    def _checksum(self) -> int:
        return zlib.crc32("\n".join(_names(self.columns)).encode())


def _names(columns: Sequence[Column]) -> list[str]:
    return [column.name for column in columns]


def _other_names(columns: Sequence[Column]) -> ModelError:
    return ModelError(
        "An objective gives the same metrics for every shard. "
        f"Got {_names(columns)} in one and others in another. Return every name every time."
    )
