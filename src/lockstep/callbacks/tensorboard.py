"""Writes the loss and the metrics of a run as event files for TensorBoard, under the names that Keras uses."""

import itertools
import os
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs, parse_every
from lockstep.core.arguments import check_path
from lockstep.display.curve_pictures import VALIDATION
from lockstep.display.number_format import to_float
from lockstep.errors import CallbackError, MissingExtra

VERSION = "brain.Event:2"

_file_numbers = itertools.count()


class TensorBoard(Callback):
    """Writes the loss and metrics of every epoch (`epoch_loss`, ...) to `folder/train` and `folder/validation`.

    The step in TensorBoard is the number of the epoch. The learning rate is written as `epoch_learning_rate`; the rates
    of further parameter groups are `epoch_learning_rate_1` and so on. With `every=100` the values after every 100th
    step (`batch_loss`, ...) are written too, with the number of the training step; reading these values waits for the
    device. View the curves with `tensorboard --logdir folder`. Raises `MissingExtra` if tensorboard is not installed.

    A resumed run hides the old values that it writes again. With `every=100` it hides training values by the number of
    the training step, so a value of an epoch that was written after the checkpoint appears twice.

    >>> import lockstep, tempfile, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with lockstep.wrap(net, sgd, loss) as trainer:
    ...         history = trainer.fit((x, y), validation_data=(x, y), callbacks=[TensorBoard(folder)], verbose=0)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['train', 'validation']
    """

    def __init__(self, folder: str | PathLike[str], every: int | str = "epoch") -> None:
        self.folder = Path(check_path("folder", folder, CallbackError, "runs/first"))
        self._steps = parse_every(every)
        self._files: dict[str, EventFile] = {}
        self._first_epoch: int | None = None

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        check_tensorboard()
        self._first_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        if self._first_epoch is None:
            self._first_epoch = epoch
            self._first_step = self.trainer.num_steps

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self._steps and self.trainer.num_steps % self._steps == 0:
            self._write("train", "batch", self.trainer.num_steps, {**logs, **self._read_rates()})

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        train = {name: value for name, value in logs.items() if not name.startswith(VALIDATION)}
        validation = {name.removeprefix(VALIDATION): logs[name] for name in logs if name not in train}
        self._write("train", "epoch", epoch, {**train, **self._read_rates()})
        if validation:
            self._write("validation", "epoch", epoch, validation)
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Closes the event files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _read_rates(self) -> dict[str, float]:
        rates = self.trainer.learning_rates
        return {f"learning_rate_{index}" if index else "learning_rate": rate for index, rate in enumerate(rates)}

    def _write(self, run: str, prefix: str, step: int, values: Logs) -> None:
        numbers = {name: to_float(value) for name, value in values.items()}  # callbacks may have written strings
        scalars = {f"{prefix}_{name}": value for name, value in numbers.items() if isinstance(value, float)}
        self._open_file(run).write_scalars(step, scalars)

    def _open_file(self, run: str) -> "EventFile":
        """Returns the event file of the folder `train` or `validation`; creates it if it does not exist yet."""
        if run not in self._files:
            self._files[run] = EventFile(self.folder / run)
            if getattr(self.trainer, "resumed", ""):
                assert self._first_epoch is not None
                # An epoch's number is never greater than its last step's, so restarting by step hides no valid epoch.
                by_step = run == "train" and self._steps
                self._files[run].restart(self._first_step + 1 if by_step else self._first_epoch)
        return self._files[run]


class EventFile:
    """Writes a new event file with scalars by step, which TensorBoard can read.

    The file is written with TensorBoard's own protos and record writer, but not with its asynchronous writer, which
    imports TensorFlow if TensorFlow is installed. The file is not synced to the disk: TensorBoard skips a last record
    that was cut off, and a resumed run writes the record again.

    >>> import tempfile
    >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = EventFile(Path(folder))
    ...     file.write_scalars(3, {"epoch_loss": 0.5})
    ...     file.close()
    ...     events = EventAccumulator(folder).Reload().Scalars("epoch_loss")
    >>> [(event.step, event.value) for event in events]
    [(3, 0.5)]
    """

    def __init__(self, folder: Path) -> None:
        import socket

        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so the name begins with the time.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._file = RecordWriter((folder / name).open("wb"))
        self._write(file_version=VERSION)

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes several values, given by name, with the same step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        items = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=Summary(value=items))

    def restart(self, step: int) -> None:
        """Makes TensorBoard hide the values from this step on in earlier files of the same folder."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def flush(self) -> None:
        """Writes buffered values to the file."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **content).SerializeToString())


def check_tensorboard() -> None:
    """Raises `MissingExtra`, with the command that installs it, if TensorBoard is not installed.

    >>> check_tensorboard()
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "TensorBoard needs the package tensorboard, which is not installed. "
            'Run: pip install "lockstep-train[tensorboard]"'
        ) from error
