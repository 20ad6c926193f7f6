"""Writes one row per epoch to a CSV file, which can be read while training continues."""

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
    """Writes a row with the values of each epoch, in full precision, to the CSV file `path` when the epoch ends.

    With `append=True` the rows that the file has already are kept. A resumed run continues its own rows: rows of epochs
    that it repeats are removed, and rows that are missing from the file are written again from the history. A metric
    that appears later gets a new column, which is empty in the earlier rows.

    >>> import lockstep, tempfile, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> with tempfile.TemporaryDirectory() as folder, lockstep.wrap(net, sgd, loss, metrics=["accuracy"]) as trainer:
    ...     history = trainer.fit((x, y), epochs=2, callbacks=[CSVLogger(folder + "/log.csv")], verbose=0)
    ...     Path(folder + "/log.csv").read_text().splitlines()[0]
    'epoch,loss,accuracy'
    """

    def __init__(self, path: str | PathLike[str], append: bool = True) -> None:
        self.path = Path(check_path("path", path, CallbackError, "log.csv"))
        self.append = check_flag("append", append, CallbackError)
        self.on_train_begin()

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._table: CSVTable | None = None
        self._rows_before: int | None = None
        """The number of rows that other runs have written to the file; None before the first epoch of this run."""

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
        """Returns the table in the file without the rows of epochs that the resumed run repeats."""
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
    """A table in a CSV file, to which rows and columns can be added; the file is complete at any moment.

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
        """Returns the table in a file, without an incomplete last row; an empty table if the file does not exist."""
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = csv.reader(StringIO(text[: text.rfind("\n") + 1]))
        header, *rows = [line for line in lines if line] or [[EPOCH]]
        if EPOCH not in header:
            raise CallbackError(
                f"CSVLogger cannot append to {path}, because the file has no column {EPOCH!r}: it begins with "
                f"{text.partition(chr(10))[0][:60]!r}. Use another path, or append=False."
            )
        return cls(path, header, [dict(zip(header, row, strict=False)) for row in rows])

    def add(self, row: Row) -> None:
        """Adds a row to the table and to the file, with new columns for the names that have no column yet."""
        new = [name for name in row if name not in self.columns]
        self.columns += new
        self.rows.append(row)
        if new:
            self.write()
        else:
            append_to_file(self.path, self._format([row]))

    def write(self) -> None:
        """Replaces the file atomically with the table."""
        header = dict(zip(self.columns, self.columns, strict=True))
        replace_file(self.path, self._format([header, *self.rows]))

    def _format(self, rows: list[Row]) -> bytes:
        buffer = StringIO()
        csv.DictWriter(buffer, self.columns, restval="", lineterminator="\n").writerows(rows)
        return buffer.getvalue().encode()
