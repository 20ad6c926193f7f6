"""Keras's two lines per epoch.

`fit` of a Keras model prints them, with a bar below them in a terminal or notebook. `verbose=2` prints them for
every model, without a bar.
"""

from rich.text import Text

from lockstep.callbacks.base import NO_LOGS, Logs
from lockstep.display.number_format import significant
from lockstep.display.progress import Progress
from lockstep.display.terminal import PlainOutput


class KerasProgress(Progress):
    """An epoch's number, and after it its steps, its time and its numbers.

    >>> from types import SimpleNamespace
    >>> from lockstep.callbacks import Chain, History
    >>> history = History(devices=("cpu:0",))
    >>> trainer = SimpleNamespace(opening="1 device (cpu:0)", resumed="", history=history, breakdown=None)
    >>> chain = Chain([KerasProgress()], trainer, {"epochs": 2, "steps": 782, "batch_size": 64, "examples": 50_000})
    >>> chain.on_train_begin()
    1 device (cpu:0)
    >>> chain.on_epoch_begin(0)
    Epoch 1/2
    >>> chain.on_train_batch_end(781)
    >>> history.record(0, {"loss": 0.4123, "val_loss": 0.5}, seconds=5.2)
    >>> chain.on_epoch_end(0, {"loss": 0.4123, "val_loss": 0.5})
    782/782 - 5s - 7ms/step - loss: 0.4123 - val_loss: 0.5000
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        super().on_epoch_begin(epoch)
        if self._greeted:
            self._screen.keep(Text(f"Epoch {epoch + 1}/{self.params['epochs']}"))

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        steps = self._batch + 1
        recorded = self._recorded(epoch)
        seconds = self._own_seconds() if recorded is None else recorded
        self._epoch = None
        self._screen.keep(Text(keras_line(steps, self.params.get("steps"), seconds, logs)))

    def _greet(self) -> None:
        """The opening comes with the first batch, and the epoch's number after it."""
        super()._greet()
        if self._greeted and self._epoch is not None:
            self._screen.keep(Text(f"Epoch {self._epoch + 1}/{self.params['epochs']}"))


class KerasLines(KerasProgress):
    """The same without a bar."""

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._greeted = False
        self._screen = PlainOutput(self._console)
        self._greet()


def keras_line(steps: int, total: int | None, seconds: float, values: Logs) -> str:
    """Steps, time and numbers as Keras writes them after an epoch or an evaluation.

    >>> keras_line(3, None, 1.4, {"loss": 0.5})
    '3/3 - 1s - 467ms/step - loss: 0.5000'
    """
    facts = [f"{steps}/{total or steps}", f"{seconds:.0f}s", f"{_short(seconds / max(steps, 1))}/step"]
    return " - ".join([*facts, *(f"{name}: {significant(value)}" for name, value in values.items())])


def _short(seconds: float) -> str:
    """A time as Keras writes it.

    >>> _short(2.4), _short(0.0068), _short(0.00042)
    ('2s', '7ms', '420us')
    """
    for unit, per_second in (("s", 1), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return f"{seconds * per_second:.0f}{unit}"
    return f"{seconds * 1e6:.0f}us"
