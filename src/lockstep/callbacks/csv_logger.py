"""The CSV logger: every epoch's numbers in a file that can be read while training goes on."""

from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.csv_table import EPOCH, Row, Table
from lockstep.core.arguments import check_flag, check_path
from lockstep.display.number_format import as_float
from lockstep.errors import CallbackError


class CSVLogger(Callback):
    """Writes one row per epoch, every digit kept; the row is in the file when the epoch ends.

    What the file held before stays above, unless `append=False`. A resumed run goes on with its
    own rows: those of epochs that it makes again are dropped, those that the file has lost
    come from the history. A metric that appears later gets a column, empty in the rows before.

    >>> import tempfile
    >>> from types import SimpleNamespace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(folder + "/log.csv")
    ...     logger.on_train_begin()
    ...     logger.on_epoch_begin(0)
    ...     logger.on_epoch_end(0, {"loss": 0.5, "accuracy": 0.75})
    ...     print(Path(folder + "/log.csv").read_text(), end="")
    epoch,loss,accuracy
    0,0.5,0.75
    """

    def __init__(self, path: str | PathLike[str], append: bool = True) -> None:
        self.path = Path(check_path("path", path, CallbackError, "log.csv"))
        self.append = check_flag("append", append, CallbackError)
        self.on_train_begin()

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._table: Table | None = None
        self._rows_before: int | None = None
        """Rows that other runs have left in the file; None while this one has not begun."""

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self._table is None:
            self._table = self._begun() if self._rows_before is None else self._resumed(epoch, self._rows_before)
            self._table.write()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        assert self._table is not None
        self._table.add({EPOCH: epoch, **{name: as_float(value) for name, value in logs.items()}})

    def state_dict(self) -> dict[str, Any]:
        return {"rows_before": self._rows_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows_before = state["rows_before"]

    def _begun(self) -> Table:
        table = Table.read(self.path) if self.append else Table(self.path)
        self._rows_before = len(table.rows)
        return table

    def _resumed(self, epoch: int, before: int) -> Table:
        """The file as it was when this epoch began first."""
        table = Table.read(self.path)
        others, own = table.rows[:before], table.rows[before:]
        history = self.trainer.history
        made: dict[int, Row] = {
            number: {EPOCH: number, **{name: column[index] for name, column in history.history.items()}}
            for index, number in enumerate(history.epoch)
        }
        made |= {int(row[EPOCH]): row for row in own}
        table.rows = [*others, *(made[number] for number in sorted(made) if number < epoch)]
        table.columns = list(dict.fromkeys([*table.columns, *(name for row in table.rows for name in row)]))
        self._rows_before = len(others)
        return table
