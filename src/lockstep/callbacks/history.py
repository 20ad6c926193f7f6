"""The history of a run, which `fit` returns: the loss and the metrics of every epoch.

Every list has one entry per finished epoch. If a value was not measured in an epoch, its entry is NaN, so all lists
have the same length.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import Logs
from lockstep.core.atomic_file import replace_file
from lockstep.display.curve_pictures import draw, in_notebook, render_picture, show_picture
from lockstep.display.number_format import format_duration, format_significant, to_float


@dataclass(repr=False)
class History:
    """The loss and the metrics of every finished epoch, in attributes with the same names as in Keras.

    >>> history = History(devices=("cpu:0", "cpu:1"))
    >>> history.record(0, {"loss": 0.7, "accuracy": 0.75, "val_accuracy": 0.81}, seconds=9.4)
    >>> history.record(1, {"loss": 0.4, "accuracy": 0.86, "val_accuracy": 0.93}, seconds=9.0)
    >>> history["loss"]
    [0.7, 0.4]
    >>> history
    History(2 epochs: loss 0.4000, accuracy 0.8600, val_accuracy 0.9300)
    >>> history.summarize()
    'val acc: 0.93, 9.2 sec/epoch on 2 devices: cpu:0, cpu:1'
    """

    devices: tuple[str, ...] = ()
    history: dict[str, list[float]] = field(default_factory=dict)
    """A list of one value per epoch for each name: loss, val_loss, …, and values that callbacks wrote into the logs."""
    epoch: list[int] = field(default_factory=list)
    """The numbers of the epochs, counted from 0."""
    seconds: list[float] = field(default_factory=list)
    """The training time of each epoch, without validation."""

    def record(self, epoch: int, logs: Logs, seconds: float) -> None:
        """Adds the values of a finished epoch; reads every value of `logs` once.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.epoch, history.seconds, history.history
        ([0], [1.5], {'loss': [0.5]})
        """
        values = {name: to_float(value) for name, value in logs.items()}
        for name in values:
            self.history.setdefault(name, [math.nan] * len(self.epoch))
        for name, column in self.history.items():
            column.append(values.get(name, math.nan))
        self.epoch.append(epoch)
        self.seconds.append(float(seconds))

    def amend(self, logs: Logs) -> None:
        """Replaces the values of the last epoch with `logs`, into which callbacks may have written since.

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
        """Returns the values of all epochs, for a checkpoint.

        >>> history = History(devices=("cpu:0",))
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.state_dict()
        {'history': {'loss': [0.5]}, 'epoch': [0], 'seconds': [1.5]}
        """
        columns = {name: list(column) for name, column in self.history.items()}
        return {"history": columns, "epoch": list(self.epoch), "seconds": list(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the values of all epochs that `state_dict` returned; `devices` does not change.

        >>> history = History(devices=("cpu:0", "cpu:1"))
        >>> history.load_state_dict({"history": {"loss": [0.5]}, "epoch": [0], "seconds": [1.5]})
        >>> history, history.devices
        (History(1 epoch: loss 0.5000), ('cpu:0', 'cpu:1'))
        """
        self.history = {name: list(column) for name, column in state["history"].items()}
        self.epoch = list(state["epoch"])
        self.seconds = list(state["seconds"])

    def __getitem__(self, name: str) -> list[float]:
        """Returns the list of one value per epoch, as `history.history[name]`.

        >>> History(history={"loss": [0.5]})["loss"]
        [0.5]
        """
        if name not in self.history:
            raise KeyError(
                f"The history has no values named {name!r}. Use one of {', '.join(self.history)}."
                if self.history
                else f"The history has no values named {name!r}, because no epoch has finished yet."
            )
        return self.history[name]

    def __contains__(self, name: object) -> bool:
        """Returns whether there are values of this name."""
        return name in self.history

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return iter(self.history)

    def last(self) -> dict[str, float]:
        """Returns the values of the last epoch by name.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> history.last()
        {'loss': 0.5}
        """
        return {name: column[-1] for name, column in self.history.items() if column}

    def summarize(self) -> str:
        """Returns one line of text with the result of the run, the time per epoch and the devices.

        >>> history = History(devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
        >>> history.record(0, {"loss": 0.31, "accuracy": 0.9}, seconds=0.034)
        >>> history.summarize()
        'train acc: 0.90, 0.034 sec/epoch on 4 devices: cpu:0 … cpu:3'
        """
        if not self.epoch:
            return f"no epoch finished{self._describe_devices()}"
        mean = sum(self.seconds) / len(self.seconds)
        return f"{self._describe_result()}, {format_duration(mean)} sec/epoch{self._describe_devices()}"

    def plot(self, path: str | PathLike[str] | None = None) -> Path | None:
        """Draws the curves of loss and metrics into a picture file, and returns the path of the file.

        The ending of `path` decides the format: PNG, SVG or PDF. Without a path the file is `curves.png`; in a notebook
        the picture is shown instead, and None is returned. Validation curves are dashed. Raises `MissingExtra` if
        matplotlib is not installed; no display is needed.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5, "val_loss": 0.6}, seconds=1.0)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history.plot(folder + "/curves.png").name
        'curves.png'
        """
        if path is None and in_notebook():
            show_picture(render_picture(draw(self.epoch, self.history)))
            return None
        target = Path("curves.png" if path is None else path)
        if not target.suffix:
            target = target.with_suffix(".png")
        replace_file(target, render_picture(draw(self.epoch, self.history), target.suffix[1:]))
        return target

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Writes a CSV file with one row per epoch, in full precision, and returns the path of the file.

        >>> history = History()
        >>> history.record(0, {"loss": 0.5}, seconds=1.5)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(history.to_csv(folder + "/run.csv").read_text(), end="")
        epoch,seconds,loss
        0,1.5,0.5
        """
        target = Path(path)
        buffer = StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(["epoch", "seconds", *self.history])
        writer.writerows(zip(self.epoch, self.seconds, *self.history.values(), strict=True))
        replace_file(target, buffer.getvalue().encode())
        return target

    def __repr__(self) -> str:
        count = len(self.epoch)
        epochs = f"{count} epoch" if count == 1 else f"{count} epochs"
        last = ", ".join(f"{name} {format_significant(column[-1])}" for name, column in self.history.items() if column)
        return f"History({epochs}: {last})" if last else f"History({epochs})"

    def _describe_result(self) -> str:
        """Returns a text with the last validation accuracy; if this was not measured, with another value."""
        for name, label in (("val_accuracy", "val acc"), ("accuracy", "train acc")):
            if name in self.history:
                return f"{label}: {self._find_last(name):.2f}"
        for name, label in (("val_loss", "val loss"), ("loss", "loss")):
            if name in self.history:
                return f"{label}: {format_significant(self._find_last(name))}"
        return f"{len(self.epoch)} epochs"

    def _find_last(self, name: str) -> float:
        """Returns the value of the last epoch in which `name` was measured; NaN if it was never measured."""
        measured = [value for value in self.history[name] if not math.isnan(value)]
        return measured[-1] if measured else math.nan

    def _describe_devices(self) -> str:
        """Returns a text with the devices for the end of a sentence; an empty text if the devices are not known."""
        if not self.devices:
            return ""
        if len(self.devices) == 1:
            return f" on 1 device: {self.devices[0]}"
        names = ", ".join(self.devices) if len(self.devices) == 2 else f"{self.devices[0]} … {self.devices[-1]}"
        return f" on {len(self.devices)} devices: {names}"
