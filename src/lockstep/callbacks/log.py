"""Log: passes the values of a run to a function, such as `wandb.log`."""

from collections.abc import Callable
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs, parse_every
from lockstep.display.number_format import to_float
from lockstep.errors import CallbackError


class Log(Callback):
    """Calls `function` after every epoch with a dict: its values as floats, the number of the epoch and of the step.

    With `every=100` also after every hundredth step, with the means so far in the epoch; reading them waits for the
    device. The step counts from 1 and over the whole run.

    >>> from types import SimpleNamespace
    >>> log = Log(print)
    >>> log.set_trainer(SimpleNamespace(num_steps=235))
    >>> log.on_epoch_begin(0)
    >>> log.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.75})
    {'epoch': 0, 'step': 235, 'loss': 0.5, 'val_loss': 0.75}
    """

    def __init__(self, function: Callable[[dict[str, Any]], object], every: int | str = "epoch") -> None:
        if not callable(function):
            raise CallbackError(
                f"Log needs a function that takes a dict. Got {function!r}. Use for example Log(print)."
            )
        self._function = function
        self._steps = parse_every(every)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self._steps and self.trainer.num_steps % self._steps == 0:
            self._call(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._call(logs)

    def _call(self, logs: Logs) -> None:
        values = {name: to_float(value) for name, value in logs.items()}
        self._function({"epoch": self._epoch, "step": self.trainer.num_steps, **values})
