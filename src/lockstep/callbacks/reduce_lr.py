"""Reduces the learning rate when a metric no longer improves."""

from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.callbacks.schedule import read_learning_rates
from lockstep.core.arguments import check_integer, check_number
from lockstep.core.monitor import Monitor
from lockstep.errors import CallbackError


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rates by `factor` after `patience` epochs without an improvement, as in Keras.

    `monitor` is the metric's name, and an improvement must be larger than `min_delta`. `mode` says whether lower values
    ("min") or higher values ("max") are better, or that the name decides it ("auto"). After a reduction, epochs are
    not counted for `cooldown` epochs. The rate of every group of parameters is reduced, but not below `min_lr`.

    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> callback = ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=10.0)  # no epoch is so much better
    >>> with lockstep.wrap(net, sgd, loss) as trainer:
    ...     history = trainer.fit((x, y), epochs=5, callbacks=[callback], verbose=0)
    ...     trainer.learning_rates
    (0.125,)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        check_number("factor", factor, CallbackError, 0.1)
        check_number("min_lr", min_lr, CallbackError, 0)
        if not 0 < factor < 1:
            raise CallbackError(
                f"factor, which multiplies the learning rate, must be above 0 and below 1. Got {factor}. Use "
                "factor=0.1."
            )
        if not min_lr >= 0:
            raise CallbackError(f"min_lr must be 0 or more. Got {min_lr}. Use min_lr=0.")
        self.monitor = Monitor(monitor, mode, min_delta)
        self.factor = factor
        self.patience = check_integer("patience", patience, CallbackError, least=0)
        self.cooldown = check_integer("cooldown", cooldown, CallbackError, least=0)
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.cooling = 0

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        value = self.monitor.value(logs, self.params.get("validated", True))
        if value is None:
            return
        if self.cooling:
            self.cooling -= 1
            self.wait = 0
        if self.monitor.is_better(value, self.best):
            self.best = value
            self.wait = 0
        elif not self.cooling:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce()

    def state_dict(self) -> dict[str, Any]:
        return {"wait": self.wait, "best": self.best, "cooling": self.cooling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait, self.best, self.cooling = state["wait"], state["best"], state["cooling"]

    def _reduce(self) -> None:
        rates = read_learning_rates(self.trainer, "ReduceLROnPlateau")
        if any(rate > self.min_lr for rate in rates):
            self.trainer.learning_rates = tuple(
                max(rate * self.factor, self.min_lr) if rate > self.min_lr else rate for rate in rates
            )
            self.cooling = self.cooldown
            self.wait = 0
