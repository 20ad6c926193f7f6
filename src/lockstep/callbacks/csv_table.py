"""The table: a CSV file of one row per epoch, whose columns may grow."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from lockstep.callbacks.files import replace
from lockstep.errors import CallbackError

EPOCH = "epoch"

Row = Mapping[str, str | int | float]


@dataclass
class Table:
    """The rows of a file, which is always whole: a column that comes late is empty in the rows before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Table(Path(folder) / "log.csv")
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
    def read(cls, path: Path) -> "Table":
        """The table in a file, an empty one where there is none; a last row that was cut off is not read."""
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = csv.reader(StringIO(text[: text.rfind("\n") + 1]))
        header, *rows = [line for line in lines if line] or [[EPOCH]]
        if EPOCH not in header:
            raise CallbackError(
                f"A log has a column {EPOCH!r}. {path} begins with {text.partition(chr(10))[0][:60]!r}. "
                "Give another path, or append=False."
            )
        return cls(path, header, [dict(zip(header, row, strict=False)) for row in rows])

    def add(self, row: Row) -> None:
        """Writes one more row."""
        new = [name for name in row if name not in self.columns]
        self.columns += new
        self.rows.append(row)
        if new:
            self.write()
            return
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._text([row]))

    def write(self) -> None:
        """Writes the whole file anew."""
        header = dict(zip(self.columns, self.columns, strict=True))
        replace(self.path, self._text([header, *self.rows]).encode())

    def _text(self, rows: list[Row]) -> str:
        buffer = StringIO()
        csv.DictWriter(buffer, self.columns, restval="", lineterminator="\n").writerows(rows)
        return buffer.getvalue()
