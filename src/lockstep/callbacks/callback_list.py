"""Combines several callbacks into one, so that the training loop calls each method once."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from lockstep.callbacks.base import NO_LOGS, Callback, Logs, Params, SharedLogs
from lockstep.callbacks.keras_adapter import KerasCallback
from lockstep.callbacks.keras_backups import Backup, Restored, adapt_callback
from lockstep.callbacks.schedule import LearningRateSchedule
from lockstep.errors import CallbackError, StateError

_READERS = ("lockstep.display.", "lockstep.callbacks.ema", "lockstep.callbacks.tensorboard")
_IDLE = {Callback.on_train_batch_begin, Callback.on_train_batch_end}


class CallbackList(Callback):
    """A callback whose methods call the same method of several callbacks in order, with the same logs.

    >>> class Print(Callback):
    ...     def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
    ...         print(f"epoch {epoch} of {self.params['epochs']}: {logs['loss']}")
    >>> callbacks = CallbackList([Print(), Print()], trainer=None, params={"epochs": 3})
    >>> callbacks.on_epoch_end(0, {"loss": 0.5})
    epoch 0 of 3: 0.5
    epoch 0 of 3: 0.5
    """

    def __init__(self, callbacks: Iterable[Callback], trainer: Any, params: Params) -> None:
        self.callbacks = check_callbacks(callbacks)
        self.set_trainer(trainer)
        self.set_params(params)

    def set_trainer(self, trainer: Any) -> None:
        super().set_trainer(trainer)
        for callback in self.callbacks:
            callback.set_trainer(trainer)

    def set_params(self, params: Params) -> None:
        super().set_params(params)
        for callback in self.callbacks:
            callback.set_params(params)

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_train_begin", logs)

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._call("on_epoch_begin", logs, epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        self._call("on_epoch_end", logs, epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        self._call("on_train_batch_begin", logs, batch)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        self._call("on_train_batch_end", logs, batch)

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_test_begin", logs)

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        self._call("on_test_end", logs)

    def state_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]  # one dict for each callback
        """Returns the class name and the state of every callback that overrides `state_dict`, in order."""
        return [{"name": type(callback).__name__, "state": callback.state_dict()} for callback in self._stateful()]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:  # type: ignore[override]
        """Loads every state into its callback; raises StateError if the classes of the callbacks have changed."""
        callbacks = self._stateful()
        saved, given = [part["name"] for part in state], [type(callback).__name__ for callback in callbacks]
        if saved != given:
            raise StateError(
                f"The checkpoint has the states of these callbacks: {_join(saved)}; fit() was given {_join(given)}. "
                "Give callbacks=[...] of the same classes in the same order."
            )
        for callback, part in zip(callbacks, state, strict=True):
            callback.load_state_dict(part["state"])

    @property
    def are_quiet(self) -> bool:
        """Whether no callback can change what a step uses between two steps of an epoch."""
        return not any(map(_acts_between_steps, self.callbacks))

    @property
    def restored(self) -> Restored | None:
        """The backup that Keras's BackupAndRestore has restored when training began; None if there was no backup."""
        return next((each.found for each in self.callbacks if isinstance(each, Backup) and each.found), None)

    def close(self) -> None:
        """Closes every callback in order, even if one of them raises."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.close)

    def _call(self, moment: str, logs: Logs, *index: int) -> None:
        # Callbacks can write to a plain dict. Any other mapping computes its values when they are read, and is wrapped.
        shared = logs if isinstance(logs, dict) else SharedLogs(logs)
        for callback in self.callbacks:
            getattr(callback, moment)(*index, shared)

    def _stateful(self) -> list[Callback]:
        """Returns the callbacks that override `state_dict`; a resumed run may leave out or add other callbacks."""
        return [callback for callback in self.callbacks if type(callback).state_dict is not Callback.state_dict]


def check_callbacks(callbacks: Iterable[Any] | None) -> tuple[Callback, ...]:
    """Returns the callbacks as a tuple, with Keras callbacks wrapped; raises CallbackError for any other object."""
    if callbacks is None:  # Keras's default
        return ()
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise CallbackError(f"callbacks must be a list. Got {_show(callbacks)}. Use callbacks=[{_show(callbacks)}].")
    result = tuple(map(adapt_callback, callbacks))
    for position, callback in enumerate(result):
        if isinstance(callback, type) and hasattr(callback, "on_epoch_end"):
            raise CallbackError(
                f"callbacks[{position}] is the class {callback.__name__}, not an instance. Use {callback.__name__}()."
            )
        if not isinstance(callback, Callback):
            raise CallbackError(
                f"callbacks[{position}] is {_show(callback)}, not a lockstep.Callback. "
                "Subclass lockstep.Callback and override on_epoch_end or another method."
            )
    return result


def _acts_between_steps(callback: Callback) -> bool:
    """Returns whether a callback may change what a step uses when it is called before or after a batch."""
    if type(callback).__module__.startswith(_READERS):
        return False
    if type(callback) is LearningRateSchedule:
        return callback.per == "step"
    if type(callback) is KerasCallback:
        return callback.acts_on_batches
    methods = (callback.on_train_batch_begin, callback.on_train_batch_end)
    return {getattr(method, "__func__", None) for method in methods} != _IDLE


def _show(value: object) -> str:
    """Returns a value as text for an error message: the class of a callback, the repr of any other object."""
    return f"{type(value).__name__}()" if isinstance(adapt_callback(value), Callback) else repr(value)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
