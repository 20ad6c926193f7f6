"""Passes the loss and the metrics of a run to a function, such as `wandb.log`."""

from collections.abc import Callable
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs, parse_every
from lockstep.display.number_format import to_float
from lockstep.errors import CallbackError


class Log(Callback):
    """Calls `function` after every epoch with a dict of the values of the epoch, its number, and the number of steps.

    With `every=100` the function is also called after every hundredth step, with the means over the epoch so far;
    reading these waits for the device. Epochs count from 0. Steps count from 1, over the whole run.

    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.0), torch.nn.CrossEntropyLoss()
    >>> log = Log(lambda values: print({**values, "loss": "…"}))  # or Log(wandb.log)
    >>> with lockstep.wrap(net, sgd, loss) as trainer:
    ...     history = trainer.fit((x, y), epochs=2, batch_size=4, callbacks=[log], verbose=0)
    {'epoch': 0, 'step': 2, 'loss': '…'}
    {'epoch': 1, 'step': 4, 'loss': '…'}
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
