"""Chain: many callbacks behind the face of one, so that the loop calls each moment once."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from lockstep.callbacks.backups import Backup, Restored, adapted
from lockstep.callbacks.base import NO_LOGS, Callback, Logs, Params, SharedLogs
from lockstep.errors import CallbackError, StateError


class Chain(Callback):
    """Passes every moment on to `callbacks`, in the order given, with logs that all of them share.

    >>> class Shout(Callback):
    ...     def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
    ...         print(f"epoch {epoch} of {self.params['epochs']}: {logs['loss']}")
    >>> chain = Chain([Shout(), Shout()], trainer=None, params={"epochs": 3})
    >>> chain.on_epoch_end(0, {"loss": 0.5})
    epoch 0 of 3: 0.5
    epoch 0 of 3: 0.5
    """

    def __init__(self, callbacks: Iterable[Callback], trainer: Any, params: Params) -> None:
        self.callbacks = checked(callbacks)
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
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_train_begin(logs)

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_test_begin(logs)

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        logs = _shared(logs)
        for callback in self.callbacks:
            callback.on_test_end(logs)

    def state_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]  # one for each, not one
        """The class and the state of every callback that has one, in order."""
        return [{"name": type(callback).__name__, "state": callback.state_dict()} for callback in self._stateful()]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:  # type: ignore[override]
        """Hands every state to its callback, where they are the callbacks that it came from."""
        callbacks = self._stateful()
        saved, here = [part["name"] for part in state], [type(callback).__name__ for callback in callbacks]
        if saved != here:
            raise StateError(
                "A run goes on with the callbacks that it had. "
                f"Saved are the states of {_listed(saved)}, and fit was given {_listed(here)}. "
                "Give callbacks=[...] of these classes in this order."
            )
        for callback, part in zip(callbacks, state, strict=True):
            callback.load_state_dict(part["state"])

    def _stateful(self) -> list[Callback]:
        """The callbacks that keep a state; those without one may come and go."""
        return [callback for callback in self.callbacks if type(callback).state_dict is not Callback.state_dict]

    @property
    def restored(self) -> Restored | None:
        """What a backup of Keras's has brought back, once training has begun."""
        return next((each.found for each in self.callbacks if isinstance(each, Backup) and each.found), None)

    def close(self) -> None:
        """Closes every callback, in order, also when one of them raises."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.close)


def checked(callbacks: Iterable[Any] | None) -> tuple[Callback, ...]:
    """The callbacks as a tuple, Keras's own behind Lockstep's face, or an error that says which one is none."""
    if callbacks is None:  # Keras's default
        return ()
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise CallbackError(f"callbacks is a list. Got {_shown(callbacks)}. Write callbacks=[{_shown(callbacks)}].")
    result = tuple(map(adapted, callbacks))
    for position, callback in enumerate(result):
        if isinstance(callback, type) and hasattr(callback, "on_epoch_end"):
            raise CallbackError(
                f"A callback is an instance. Got the class {callback.__name__} at callbacks[{position}]. "
                f"Write {callback.__name__}()."
            )
        if not isinstance(callback, Callback):
            raise CallbackError(
                f"A callback inherits lockstep.Callback. Got {_shown(callback)} at callbacks[{position}]. "
                "Subclass lockstep.Callback and override on_epoch_end or another of its methods."
            )
    return result


def _shared(logs: Logs) -> Logs:
    """Logs that a callback can write into; what is computed when it is read stays so until then."""
    return logs if isinstance(logs, dict) else SharedLogs(logs)


def _shown(value: object) -> str:
    """A value in an error: a callback by its class, anything else by its repr."""
    return f"{type(value).__name__}()" if isinstance(adapted(value), Callback) else repr(value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
