"""History: what a run was like, epoch by epoch; the value that `fit` returns.

Every list has one entry per finished epoch. A name that appears late, or only now
and then, is NaN where it was not measured, so that the lists always line up.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import Logs
from lockstep.callbacks.files import replace
from lockstep.display.curves import draw, in_notebook, picture, show_picture
from lockstep.display.number_format import as_float, duration, significant


@dataclass(repr=False)
class History:
    """The numbers of every finished epoch, with Keras's names.

    >>> history = History(devices=("cpu:0", "cpu:1"))
    >>> history.record(0, {"loss": 0.7, "accuracy": 0.75, "val_accuracy": 0.81}, seconds=9.4)
    >>> history.record(1, {"loss": 0.4, "accuracy": 0.86, "val_accuracy": 0.93}, seconds=9.0)
    >>> history["loss"]
    [0.7, 0.4]
    >>> history
    History(2 epochs: loss 0.4000, accuracy 0.8600, val_accuracy 0.9300)
    >>> history.closing()
    'val acc: 0.93, 9.2 sec/epoch on 2 devices: cpu:0, cpu:1'
    """

    devices: tuple[str, ...] = ()
    history: dict[str, list[float]] = field(default_factory=dict)
    """Name to one value per epoch: loss, accuracy, val_loss, val_accuracy … and what callbacks wrote into logs."""
    epoch: list[int] = field(default_factory=list)
    """The epochs' numbers, from 0."""
    seconds: list[float] = field(default_factory=list)
    """Time per epoch, training only."""

    def record(self, epoch: int, logs: Logs, seconds: float) -> None:
        """Adds one finished epoch. Reads every value of `logs` once.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.epoch, history.seconds, history.history
        ([0], [1.5], {'loss': [0.5]})
        """
        values = {name: as_float(value) for name, value in logs.items()}
        for name in values:
            self.history.setdefault(name, [math.nan] * len(self.epoch))
        for name, column in self.history.items():
            column.append(values.get(name, math.nan))
        self.epoch.append(epoch)
        self.seconds.append(float(seconds))

    def amend(self, logs: Logs) -> None:
        """Puts `logs` in the place of the newest epoch's values: callbacks may have written into them.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.amend({"loss": 0.5, "learning_rate": 0.1})
        >>> history.history
        {'loss': [0.5], 'learning_rate': [0.1]}
        """
        for name, column in list(self.history.items()):
            column.pop()
            if not column:
                del self.history[name]
        self.record(self.epoch.pop(), logs, self.seconds.pop())

    def state_dict(self) -> dict[str, Any]:
        """The numbers, for a checkpoint.

        >>> history = History(devices=("cpu:0",))
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.state_dict()
        {'history': {'loss': [0.5]}, 'epoch': [0], 'seconds': [1.5]}
        """
        columns = {name: list(column) for name, column in self.history.items()}
        return {"history": columns, "epoch": list(self.epoch), "seconds": list(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over saved numbers; the devices are those of the present run.

        >>> history = History(devices=("cpu:0", "cpu:1"))
        >>> history.load_state_dict({"history": {"loss": [0.5]}, "epoch": [0], "seconds": [1.5]})
        >>> history, history.devices
        (History(1 epoch: loss 0.5000), ('cpu:0', 'cpu:1'))
        """
        self.history = {name: list(column) for name, column in state["history"].items()}
        self.epoch = list(state["epoch"])
        self.seconds = list(state["seconds"])

    def __getitem__(self, name: str) -> list[float]:
        """One value per epoch, as `history.history[name]`.

        >>> History(history={"loss": [0.5]})["loss"]
        [0.5]
        """
        if name not in self.history:
            raise KeyError(f"{name}; measured were {', '.join(self.history) or 'no values yet'}")
        return self.history[name]

    def __contains__(self, name: object) -> bool:
        """Whether there are values of this name."""
        return name in self.history

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.history)

    def last(self) -> dict[str, float]:
        """The newest epoch's values.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.last()
        {'loss': 0.5}
        """
        return {name: column[-1] for name, column in self.history.items() if column}

    def closing(self) -> str:
        """Says how the run ended, how fast and on what, in one line.

        >>> history = History(devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
        >>> history.record(0, {"loss": 0.31, "accuracy": 0.9}, seconds=0.034)
        >>> history.closing()
        'train acc: 0.90, 0.034 sec/epoch on 4 devices: cpu:0 … cpu:3'
        """
        if not self.epoch:
            return f"no epoch finished{self._where()}"
        mean = sum(self.seconds) / len(self.seconds)
        return f"{self._result()}, {duration(mean)} sec/epoch{self._where()}"

    def plot(self, path: str | PathLike[str] | None = None) -> Path | None:
        """Draw the curves into a picture file (PNG, SVG, PDF, by its ending) and return its path.

        Loss in one panel, metrics in the next, validation dashed. Needs matplotlib, but no display. In a notebook
        `history.plot()` shows the picture; elsewhere that writes `curves.png`.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5, "val_loss": 0.6}, seconds=1.0)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history.plot(folder + "/curves.png").name
        'curves.png'
        """
        if path is None and in_notebook():
            show_picture(picture(draw(self.epoch, self.history)))
            return None
        target = Path("curves.png" if path is None else path)
        if not target.suffix:
            target = target.with_suffix(".png")
        replace(target, picture(draw(self.epoch, self.history), target.suffix[1:]))
        return target

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Writes one row per epoch, every digit kept, and gives the file's path.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(history.to_csv(folder + "/run.csv").read_text(), end="")
        epoch,seconds,loss
        0,1.5,0.5
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["epoch", "seconds", *self.history])
            writer.writerows(zip(self.epoch, self.seconds, *self.history.values(), strict=True))
        return target

    def __repr__(self) -> str:
        count = len(self.epoch)
        epochs = f"{count} epoch" if count == 1 else f"{count} epochs"
        last = ", ".join(f"{name} {significant(column[-1])}" for name, column in self.history.items() if column)
        return f"History({epochs}: {last})" if last else f"History({epochs})"

    def _result(self) -> str:
        """The one number the run is remembered by."""
        for name, label in (("val_accuracy", "val acc"), ("accuracy", "train acc")):
            if name in self.history:
                return f"{label}: {self._last(name):.2f}"
        for name, label in (("val_loss", "val loss"), ("loss", "loss")):
            if name in self.history:
                return f"{label}: {significant(self._last(name))}"
        return f"{len(self.epoch)} epochs"

    def _last(self, name: str) -> float:
        """The newest value that was measured; NaN where none was."""
        measured = [value for value in self.history[name] if not math.isnan(value)]
        return measured[-1] if measured else math.nan

    def _where(self) -> str:
        """The devices as the end of a sentence; nothing where none are known."""
        if not self.devices:
            return ""
        if len(self.devices) == 1:
            return f" on 1 device: {self.devices[0]}"
        names = ", ".join(self.devices) if len(self.devices) == 2 else f"{self.devices[0]} … {self.devices[-1]}"
        return f" on {len(self.devices)} devices: {names}"
