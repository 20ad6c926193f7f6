"""CSV logger: one row per epoch, in a file that can be read while training continues."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_flag, check_path
from lockstep.core.atomic_file import append_to_file, replace_file
from lockstep.display.number_format import to_float
from lockstep.errors import CallbackError

EPOCH = "epoch"

Row = Mapping[str, str | int | float]


class CSVLogger(Callback):
    """Writes one row per epoch, with every digit; the row is on the disk when the epoch ends.

    Rows that the file had before stay above, unless `append=False`. A resumed run continues its own rows: those of
    epochs that it repeats are dropped, those that the file has lost come from the history. A metric that appears later
    gets a column, which is empty in the rows before.

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
        self._table: CSVTable | None = None
        self._rows_before: int | None = None
        """The number of rows that other runs have left in the file; None before the first epoch of this one."""

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self._table is None:
            new = self._rows_before is None
            self._table = self._begin_table() if new else self._resume_table(epoch, self._rows_before or 0)
            self._table.write()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        assert self._table is not None
        self._table.add({EPOCH: epoch, **{name: to_float(value) for name, value in logs.items()}})

    def state_dict(self) -> dict[str, Any]:
        return {"rows_before": self._rows_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows_before = state["rows_before"]

    def _begin_table(self) -> "CSVTable":
        table = CSVTable.read(self.path) if self.append else CSVTable(self.path)
        self._rows_before = len(table.rows)
        return table

    def _resume_table(self, epoch: int, num_before: int) -> "CSVTable":
        """The table as it was when this epoch began the first time."""
        table = CSVTable.read(self.path)
        others, own = table.rows[:num_before], table.rows[num_before:]
        history = self.trainer.history
        by_epoch: dict[int, Row] = {
            number: {EPOCH: number, **{name: column[index] for name, column in history.history.items()}}
            for index, number in enumerate(history.epoch)
        }
        by_epoch |= {int(row[EPOCH]): row for row in own}
        table.rows = [*others, *(by_epoch[number] for number in sorted(by_epoch) if number < epoch)]
        table.columns = list(dict.fromkeys([*table.columns, *(name for row in table.rows for name in row)]))
        self._rows_before = len(others)
        return table


@dataclass
class CSVTable:
    """The rows of a CSV file, to which rows and columns can be added; the file is whole at any moment.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = CSVTable(Path(folder) / "log.csv")
    ...     table.add({"epoch": 0, "loss": 0.5})
    ...     table.add({"epoch": 1, "loss": 0.25, "val_loss": 0.5})
    ...     print(table.path.read_text(), end="")
    epoch,loss,val_loss
    0,0.5,
    1,0.25,0.5
    """

    path: Path
    columns: list[str] = field(default_factory=lambda: [EPOCH])
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "CSVTable":
        """Read the table in a file; empty if there is no file, and without a last row that was cut off."""
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = csv.reader(StringIO(text[: text.rfind("\n") + 1]))
        header, *rows = [line for line in lines if line] or [[EPOCH]]
        if EPOCH not in header:
            raise CallbackError(
                f"CSVLogger cannot append to {path}: it has no column {EPOCH!r}, and begins with "
                f"{text.partition(chr(10))[0][:60]!r}. Use another path, or append=False."
            )
        return cls(path, header, [dict(zip(header, row, strict=False)) for row in rows])

    def add(self, row: Row) -> None:
        """Add a row to the file."""
        new = [name for name in row if name not in self.columns]
        self.columns += new
        self.rows.append(row)
        if new:
            self.write()
        else:
            append_to_file(self.path, self._format([row]))

    def write(self) -> None:
        """Write the whole file."""
        header = dict(zip(self.columns, self.columns, strict=True))
        replace_file(self.path, self._format([header, *self.rows]))

    def _format(self, rows: list[Row]) -> bytes:
        buffer = StringIO()
        csv.DictWriter(buffer, self.columns, restval="", lineterminator="\n").writerows(rows)
        return buffer.getvalue().encode()
