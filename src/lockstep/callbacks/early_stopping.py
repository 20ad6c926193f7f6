"""Early stopping: end training when a metric no longer improves."""

from typing import Any

from lockstep.backends.base import Array
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_flag, check_integer, check_number
from lockstep.core.monitor import Monitor
from lockstep.errors import CallbackError


class EarlyStopping(Callback):
    """Stops after `patience` epochs in a row without an improvement of the metric, as in Keras.

    An improvement is larger than `min_delta`. With a `baseline`, only a value that is also better than that resets the
    count. Epochs before `start_from_epoch` do not count. `restore_best` gives the model, at the end of training, the
    weights and running statistics of its best epoch, of which a copy is kept on the host; the optimizer state stays.

    >>> import lockstep, numpy as np
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> callback = EarlyStopping("loss", patience=2, min_delta=1e-6, restore_best=True)
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.0), "cross_entropy") as trainer:
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
        if self.best_epoch is None:  # only NaN so far: the first epoch counts as the best
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
