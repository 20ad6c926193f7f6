"""Prints the progress of `fit` in the format of Keras, with two lines per epoch.

This is the format for a Keras model, with a progress bar in a terminal or notebook, and for `verbose=2` with any model,
without a progress bar.
"""

from rich.text import Text

from lockstep.callbacks.base import NO_LOGS, Logs
from lockstep.display.number_format import format_significant
from lockstep.display.progress import Progress
from lockstep.display.terminal import PlainOutput


class KerasProgress(Progress):
    """Prints the number of an epoch before the epoch, and its steps, time and values after the epoch.

    >>> from types import SimpleNamespace
    >>> from lockstep.callbacks import CallbackList, History
    >>> history = History(devices=("cpu:0",))
    >>> trainer = SimpleNamespace(opening="1 device (cpu:0)", resumed="", history=history, breakdown=None)
    >>> params = {"epochs": 2, "steps": 782, "batch_size": 64, "examples": 50_000}
    >>> callbacks = CallbackList([KerasProgress()], trainer, params)
    >>> callbacks.on_train_begin()
    1 device (cpu:0)
    >>> callbacks.on_epoch_begin(0)
    Epoch 1/2
    >>> callbacks.on_train_batch_end(781)
    >>> history.record(0, {"loss": 0.4123, "val_loss": 0.5}, seconds=5.2)
    >>> callbacks.on_epoch_end(0, {"loss": 0.4123, "val_loss": 0.5})
    782/782 - 5s - 7ms/step - loss: 0.4123 - val_loss: 0.5000
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        super().on_epoch_begin(epoch)
        if self._has_opened:
            self._screen.keep(Text(f"Epoch {epoch + 1}/{self.params['epochs']}"))

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        steps = self._batch + 1
        recorded = self._read_recorded_seconds(epoch)
        seconds = self._measure_seconds() if recorded is None else recorded
        self._epoch = None
        self._screen.keep(Text(format_keras_line(steps, self.params.get("steps"), seconds, logs)))

    def _print_opening(self) -> None:
        """Prints the opening line, if it is known already, and then the number of the epoch."""
        super()._print_opening()
        if self._has_opened and self._epoch is not None:
            self._screen.keep(Text(f"Epoch {self._epoch + 1}/{self.params['epochs']}"))


class KerasLines(KerasProgress):
    """Prints the lines of `KerasProgress` without a progress bar."""

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._has_opened = False
        self._screen = PlainOutput(self._console)
        self._print_opening()


def format_keras_line(steps: int, total: int | None, seconds: float, values: Logs) -> str:
    """Returns the line with steps, time and values that Keras prints after an epoch or an evaluation.

    >>> format_keras_line(3, None, 1.4, {"loss": 0.5})
    '3/3 - 1s - 467ms/step - loss: 0.5000'
    """
    facts = [f"{steps}/{total or steps}", f"{seconds:.0f}s", f"{_format_time(seconds / max(steps, 1))}/step"]
    return " - ".join([*facts, *(f"{name}: {format_significant(value)}" for name, value in values.items())])


def _format_time(seconds: float) -> str:
    """Returns a time per step as Keras prints it, in seconds, milliseconds or microseconds.

    >>> _format_time(2.4), _format_time(0.0068), _format_time(0.00042)
    ('2s', '7ms', '420us')
    """
    for unit, per_second in (("s", 1), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return f"{seconds * per_second:.0f}{unit}"
    return f"{seconds * 1e6:.0f}us"
