"""Guests: Keras callbacks as they are, behind the face of Lockstep's own.

A Keras callback knows its model, not a trainer: it stops by `model.stop_training`, reads
and writes weights and the learning rate there, and saves by `model.save`. All of this
works, for the model is the script's own and the truth. No framework is imported here: a
guest is known by its `set_model`.
"""

from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs, Params, SharedLogs


def is_guest(callback: Any) -> bool:
    """Whether this is an instance of a Keras callback.

    >>> is_guest(Callback()), is_guest(3)
    (False, False)
    """
    wanted = ("set_model", "set_params", "on_epoch_end")
    return not isinstance(callback, Callback | type) and all(hasattr(callback, name) for name in wanted)


class KerasCallback(Callback):
    """One Keras callback.

    >>> class Shout:
    ...     set_model = set_params = lambda self, given: None
    ...     def on_epoch_end(self, epoch, logs=None): print(epoch, logs)
    >>> KerasCallback(Shout()).on_epoch_end(0, {"loss": 0.5})
    0 {'loss': 0.5}
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        # Reading the logs may wait for a device: only those who look at every batch are called for it.
        self._looks = {name for name in _BATCHES if _overrides(callback, name)}

    def set_trainer(self, trainer: Any) -> None:
        """The guest gets the trainer's model."""
        super().set_trainer(trainer)
        if trainer is not None:
            trainer.model.stop_training = False
            self.callback.set_model(trainer.model)

    def set_params(self, params: Params) -> None:
        """The plan of the run under Keras's names."""
        super().set_params(params)
        self.callback.set_params(
            {"verbose": params.get("verbose", 1), "epochs": params.get("epochs"), "steps": params.get("steps")}
        )

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._tell("on_train_begin", logs=logs)

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        self._tell("on_train_end", logs=logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._tell("on_epoch_begin", epoch, logs=logs)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._tell("on_epoch_end", epoch, logs=logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if "on_train_batch_begin" in self._looks:
            self._tell("on_train_batch_begin", batch, logs=logs)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if "on_train_batch_end" in self._looks:
            self._tell("on_train_batch_end", batch, logs=logs)

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        self._tell("on_test_begin", logs=logs)

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        self._tell("on_test_end", logs=logs)

    def _tell(self, moment: str, *place: int, logs: Logs) -> None:
        """Calls the guest with a dict, as Keras does, and passes on its wish to stop."""
        method = getattr(self.callback, moment, None)
        if method is not None:
            method(*place, logs=logs.to_dict() if isinstance(logs, SharedLogs) else logs)
        if self.trainer is not None and getattr(self.trainer.model, "stop_training", False):
            self.trainer.stop_training = True


_BATCHES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


def _overrides(callback: Any, name: str) -> bool:
    """Whether the guest has a method of its own for this moment, under its new name or its old one."""
    kinds = [kind for kind in type(callback).__mro__ if kind.__name__ != "Callback"]
    names = (name, _BATCHES[name])
    return any(each in vars(kind) for kind in kinds for each in names) or any(each in vars(callback) for each in names)
