"""Runs unchanged Keras callbacks as callbacks of Lockstep.

A Keras callback refers to a model instead of a trainer: it stops training through `model.stop_training`, reads and
writes the weights and the learning rate of the model, and saves with `model.save`. This works because the trainer's
model is the script's own model, with the current state. Keras is not imported here: a Keras callback is recognized by
its method `set_model`.
"""

from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs, Params, SharedLogs


def is_keras_callback(callback: Any) -> bool:
    """Returns whether `callback` is an instance of a Keras callback.

    >>> is_keras_callback(Callback()), is_keras_callback(3)
    (False, False)
    """
    methods = ("set_model", "set_params", "on_epoch_end")
    return not isinstance(callback, Callback | type) and all(hasattr(callback, name) for name in methods)


class KerasCallback(Callback):
    """Runs one Keras callback as a callback of Lockstep.

    >>> class Print:
    ...     set_model = set_params = lambda self, given: None
    ...     def on_epoch_end(self, epoch, logs=None): print(epoch, logs)
    >>> KerasCallback(Print()).on_epoch_end(0, {"loss": 0.5})
    0 {'loss': 0.5}
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        # Reading the logs may wait for a device, so a batch method is only called if the callback overrides it.
        self._batch_methods = {name for name in _OLD_NAMES if _overrides(callback, name)}

    @property
    def acts_on_batches(self) -> bool:
        """Whether the Keras callback is called for batches."""
        return bool(self._batch_methods)

    def set_trainer(self, trainer: Any) -> None:
        """Passes the trainer's model to the Keras callback."""
        super().set_trainer(trainer)
        if trainer is not None:
            trainer.model.stop_training = False
            self.callback.set_model(trainer.model)

    def set_params(self, params: Params) -> None:
        """Passes the arguments of `fit` to the Keras callback, under the names that Keras uses."""
        super().set_params(params)
        self.callback.set_params(
            {"verbose": params.get("verbose", 1), "epochs": params.get("epochs"), "steps": params.get("steps")}
        )

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_train_begin", logs=logs)

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_train_end", logs=logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._call("on_epoch_begin", epoch, logs=logs)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._call("on_epoch_end", epoch, logs=logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if "on_train_batch_begin" in self._batch_methods:
            self._call("on_train_batch_begin", batch, logs=logs)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if "on_train_batch_end" in self._batch_methods:
            self._call("on_train_batch_end", batch, logs=logs)

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_test_begin", logs=logs)

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_test_end", logs=logs)

    def _call(self, moment: str, *index: int, logs: Logs) -> None:
        """Calls a method of the Keras callback with a dict; stops training if the callback has set `stop_training`."""
        method = getattr(self.callback, moment, None)
        if method is not None:
            method(*index, logs=logs.to_dict() if isinstance(logs, SharedLogs) else logs)
        if self.trainer is not None and getattr(self.trainer.model, "stop_training", False):
            self.trainer.stop_training = True


_OLD_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


def _overrides(callback: Any, name: str) -> bool:
    """Returns whether the callback overrides the method `name`, or the method with the older name for it."""
    kinds = [kind for kind in type(callback).__mro__ if kind.__name__ != "Callback"]
    names = (name, _OLD_NAMES[name])
    return any(each in vars(kind) for kind in kinds for each in names) or any(each in vars(callback) for each in names)
