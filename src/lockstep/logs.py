"""Logs: what a step tells."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.core.metric_kinds import merge
from lockstep.core.metrics import Column, Sums, results


class Logs(Mapping[str, float]):
    """What a step tells: the means of loss and metrics, and the gradient's norm, each worked out when it is read."""

    def __init__(
        self,
        sums: Sums,
        columns: Sequence[Column],
        norm: Callable[[], float],
        others: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._sums = sums
        self._columns = columns
        self._norm = norm
        self._others = others  # the values of metric objects for this batch alone

    def __getitem__(self, name: str) -> float:
        """One value by name; the gradient's norm can be read until the next step."""
        if name == "grad_norm":
            return self._norm()
        found = results(self._sums, self._columns)
        return found[name] if name in found else self._others()[name]

    def __iter__(self) -> Iterator[str]:
        """The names of loss and metrics; `grad_norm` is there when asked for."""
        return iter(merge(results(self._sums, self._columns), self._others()))

    def __len__(self) -> int:
        """The number of means."""
        return 1 + len(self._columns) + len(self._others())

    def __repr__(self) -> str:
        """The means as a dict shows them."""
        return repr(dict(self))
