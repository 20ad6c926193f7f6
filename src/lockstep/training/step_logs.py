"""The logs that `step`, `fit` and `evaluate` return: loss and metrics, computed from their sums when they are read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lockstep.core.metric_kinds import merge
from lockstep.core.metrics import Column, Sums, results
from lockstep.core.outputs import CollectedOutputs
from lockstep.errors import StateError
from lockstep.training.session import Session
from lockstep.training.step import StepResult

Columns = Callable[[], list[Column]]
Values = Callable[[], Mapping[str, float]]


class Totals(Mapping[str, float]):
    """The running means of loss and metrics over the steps of an epoch or an evaluation."""

    def __init__(self, columns: Columns, sums: Sums | None = None, others: Values = dict) -> None:
        self._columns = columns
        self._others = others  # the values of metric objects, which are no sums
        self.sums: Sums = np.zeros(0) if sums is None else sums
        self._values: Mapping[str, float] | None = None  # what the sums give, once it was asked for

    def add(self, sums: Sums) -> None:
        """Adds the sums of one more step."""
        self.sums = sums + self.sums if len(self.sums) else sums
        self._values = None

    def _read(self) -> Mapping[str, float]:
        if self._values is None:
            self._values = results(self.sums, self._columns())
        return self._values

    def __getitem__(self, name: str) -> float:
        """Returns one value by name."""
        values = self._read()
        return values[name] if name in values else self._others()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return iter(merge(self._read(), self._others()))

    def __len__(self) -> int:
        """Returns the number of values."""
        return 1 + len(self._columns()) + len(self._others())


class StepLogs(Totals):
    """The means of loss and metrics of one step, the gradient's norm, and the state for the next batch."""

    def __init__(
        self, columns: Columns, sums: Sums, others: Values, norm: Callable[[], float], carried: Callable[[], Any]
    ) -> None:
        super().__init__(columns, sums, others)
        self._norm = norm
        self._carried = carried

    @property
    def carried(self) -> Any:
        """The state that the objective returned as `lockstep.Carried`, for all examples of the batch in order.

        Its arrays are the framework's own, on the first device. Raises StateError if the objective returned none.
        """
        return self._carried()

    def __getitem__(self, name: str) -> float:
        """Returns one value by name; the gradient's norm can be read until the next step."""
        return self._norm() if name == "grad_norm" else super().__getitem__(name)

    def __repr__(self) -> str:
        """Returns the means in the form of a dict."""
        return repr(dict(self))


def collect_logs(session: Session, outcome: StepResult, shown: int) -> StepLogs:
    """Returns the logs of the step that was just made; the first time prints the opening line, unless `shown` is 0."""
    if shown and not session.opening.is_shown and session.processes.first:
        print(session.opening.format(session.devices), flush=True)
    session.opening.is_shown = True
    objects, columns = session.metric_objects, session.columns()
    others = objects.compute_later(*session.outputs()) if objects else dict
    found = session.carried.collect(session.collect_outputs)
    return StepLogs(
        lambda: columns,
        outcome.sums,
        others,
        lambda: _compute_norm(session, outcome),
        lambda: _join_carried(session, found),
    )


def _join_carried(session: Session, found: CollectedOutputs | None) -> Any:
    if found is None:
        raise StateError(
            "The loss of this step gives no state for the next batch. Return lockstep.Carried(loss, state) from a "
            "lockstep.objective."
        )
    return session.backend.native(found.join_carried())


def _compute_norm(session: Session, outcome: StepResult) -> float:
    """Returns the norm of the gradient of the last step; raises if `outcome` is of an earlier step."""
    if outcome.total is None:
        raise StateError(
            f"The gradient of step {outcome.step} is no longer in memory, because the next step has begun. Read "
            "logs['grad_norm'] before the next step."
        )
    return session.backend.norm(outcome.total)
