"""Ends training when a metric no longer improves."""

from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_flag, check_integer, check_number
from lockstep.core.monitor import Monitor
from lockstep.core.types import Array
from lockstep.errors import CallbackError


class EarlyStopping(Callback):
    """Stops training after `patience` epochs in a row without an improvement of a metric, as in Keras.

    `monitor` is the metric's name. An improvement must be larger than `min_delta`; `mode` says whether lower values
    ("min") or higher values ("max") are better, or that the name decides it ("auto"). With a `baseline`, the count of
    epochs is only reset by an improvement that is also better than the baseline. Epochs before `start_from_epoch` do
    not count. With `restore_best=True` the model gets the weights and running statistics of its best epoch back at the
    end of training; a copy of them is kept on the host. The optimizer state is not restored.

    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.0), torch.nn.CrossEntropyLoss()
    >>> callback = EarlyStopping("loss", patience=2, min_delta=1e-6, restore_best=True)
    >>> with lockstep.wrap(net, sgd, loss) as trainer:
    ...     history = trainer.fit((x, y), epochs=10, callbacks=[callback], verbose=0)
    >>> len(history.epoch), callback.stopped_epoch, callback.best_epoch
    (3, 2, 0)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 0,
        min_delta: float = 0.0,
        mode: str = "auto",
        restore_best: bool = False,
        baseline: float | None = None,
        start_from_epoch: int = 0,
    ) -> None:
        self.monitor = Monitor(monitor, mode, min_delta)
        self.patience = check_integer("patience", patience, CallbackError, least=0)
        self.restore_best = check_flag("restore_best", restore_best, CallbackError)
        self.baseline = None if baseline is None else check_number("baseline", baseline, CallbackError, 0.5)
        self.start_from_epoch = check_integer("start_from_epoch", start_from_epoch, CallbackError, least=0)
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.stopped_epoch: int | None = None
        self._best_weights: dict[str, Array] = {}

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        value = self.monitor.value(logs, self.params.get("validated", True))
        if value is None or epoch < self.start_from_epoch:
            return
        self.wait += 1
        if self.monitor.is_better(value, self.best):
            self.best = value
            self._note_best(epoch)
            if self.baseline is None or self.monitor.is_better(value, self.baseline):
                self.wait = 0
            return
        if self.best_epoch is None:  # all values so far are NaN: the first epoch is used as the best
            self._note_best(epoch)
        if self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        if self._best_weights:
            self.trainer.load_state({**self.trainer.state(), **self._best_weights})

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait": self.wait,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "stopped_epoch": self.stopped_epoch,
            "best_weights": dict(self._best_weights),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait, self.best = state["wait"], state["best"]
        self.best_epoch, self.stopped_epoch = state["best_epoch"], state["stopped_epoch"]
        self._best_weights = dict(state["best_weights"])

    def _note_best(self, epoch: int) -> None:
        self.best_epoch = epoch
        if self.restore_best:
            state = self.trainer.state()
            self._best_weights = {name: array for name, array in state.items() if name.startswith("model.")}
