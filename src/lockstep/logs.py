"""Logs: what a step tells."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.core.metrics import Column, Sums, results


class Logs(Mapping[str, float]):
    """What a step tells: the means of loss and metrics, and the gradient's norm, each worked out when it is read."""

    def __init__(self, sums: Sums, columns: Sequence[Column], norm: Callable[[], float]) -> None:
        self._sums = sums
        self._columns = columns
        self._norm = norm

    def __getitem__(self, name: str) -> float:
        """One value by name; the gradient's norm can be read until the next step."""
        return self._norm() if name == "grad_norm" else results(self._sums, self._columns)[name]

    def __iter__(self) -> Iterator[str]:
        """The names of loss and metrics; `grad_norm` is there when asked for."""
        return iter(results(self._sums, self._columns))

    def __len__(self) -> int:
        """The number of means."""
        return 1 + len(self._columns)

    def __repr__(self) -> str:
        """The means as a dict shows them."""
        return repr(dict(self))
