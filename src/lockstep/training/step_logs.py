"""Logs: loss and metrics out of sums, worked out when they are read."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lockstep.core.metric_kinds import merge
from lockstep.core.metrics import Column, Sums, results

Columns = Callable[[], list[Column]]
Values = Callable[[], Mapping[str, float]]


class Totals(Mapping[str, float]):
    """Running means over the steps of an epoch or an evaluation."""

    def __init__(self, columns: Columns, sums: Sums | None = None, others: Values = dict) -> None:
        self._columns = columns
        self._others = others  # the values of metric objects, which are no sums
        self.sums: Sums = np.zeros(0) if sums is None else sums

    def add(self, sums: Sums) -> None:
        """Add one more step's sums."""
        self.sums = sums + self.sums if len(self.sums) else sums

    def __getitem__(self, name: str) -> float:
        """Return one value by name."""
        values = results(self.sums, self._columns())
        return values[name] if name in values else self._others()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(merge(results(self.sums, self._columns()), self._others()))

    def __len__(self) -> int:
        """Return the number of values."""
        return 1 + len(self._columns()) + len(self._others())


class StepLogs(Totals):
    """The means of loss and metrics of one step, and the gradient's norm if it is asked for."""

    def __init__(self, columns: Columns, sums: Sums, others: Values, norm: Callable[[], float]) -> None:
        super().__init__(columns, sums, others)
        self._norm = norm

    def __getitem__(self, name: str) -> float:
        """Return one value by name; the gradient's norm can be read until the next step."""
        return self._norm() if name == "grad_norm" else super().__getitem__(name)

    def __repr__(self) -> str:
        """Show the means as a dict does."""
        return repr(dict(self))
