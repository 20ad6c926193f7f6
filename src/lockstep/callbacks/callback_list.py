"""CallbackList: several callbacks called as one, so that the training loop calls each moment once."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from lockstep.callbacks.backups import Backup, Restored, adapt_callback
from lockstep.callbacks.base import NO_LOGS, Callback, Logs, Params, SharedLogs
from lockstep.errors import CallbackError, StateError


class CallbackList(Callback):
    """Calls every moment of `callbacks`, in the order given, with logs that all of them share.

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

    def state_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]  # one for each, not one
        """Return the class name and the state of every callback that has a state, in order."""
        return [{"name": type(callback).__name__, "state": callback.state_dict()} for callback in self._stateful()]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:  # type: ignore[override]
        """Give every state to its callback; raise if the callbacks with a state are not those that were saved."""
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
    def restored(self) -> Restored | None:
        """What Keras's BackupAndRestore has restored, once training has begun."""
        return next((each.found for each in self.callbacks if isinstance(each, Backup) and each.found), None)

    def close(self) -> None:
        """Close every callback, in order, also if one of them raises."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.close)

    def _call(self, moment: str, logs: Logs, *index: int) -> None:
        # A plain dict can be written to as it is; values that are computed when they are read stay uncomputed.
        shared = logs if isinstance(logs, dict) else SharedLogs(logs)
        for callback in self.callbacks:
            getattr(callback, moment)(*index, shared)

    def _stateful(self) -> list[Callback]:
        """The callbacks that override `state_dict`; a resumed run may leave out or add the others."""
        return [callback for callback in self.callbacks if type(callback).state_dict is not Callback.state_dict]


def check_callbacks(callbacks: Iterable[Any] | None) -> tuple[Callback, ...]:
    """Return the callbacks as a tuple, Keras's wrapped as Lockstep's; raise if one is not a callback."""
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
                "Subclass lockstep.Callback and override on_epoch_end or another of its methods."
            )
    return result


def _show(value: object) -> str:
    """A value for an error message: a callback by its class, anything else by its repr."""
    return f"{type(value).__name__}()" if isinstance(adapt_callback(value), Callback) else repr(value)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
