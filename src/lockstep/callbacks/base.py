"""Callback: code of the user's that `fit` calls at fixed moments.

The method names, their order and the meaning of `logs` are Keras's, so that what
people already know, and most of what they already wrote, carries over. Callbacks
run in the controlling process only; they see the whole batch, never a shard.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypedDict

Logs = Mapping[str, float]
"""Means by name. A value may be computed when it is read, so read only what you use.

All callbacks of one moment get the same mapping, in the order in which they were given. As in
Keras, what one of them writes into it is there for those after it; what is written when an
epoch ends also becomes a column of the history.
"""

NO_LOGS: Logs = MappingProxyType({})


class SharedLogs(MutableMapping[str, float]):
    """The logs of one step: computed when they are read, and filled by whoever writes into them.

    >>> logs = SharedLogs(MappingProxyType({"loss": 0.5}))
    >>> logs["mine"] = 2.0
    >>> logs.to_dict() is logs.to_dict(), dict(logs)
    (True, {'loss': 0.5, 'mine': 2.0})
    """

    def __init__(self, values: Logs) -> None:
        self._values = values

    def to_dict(self) -> dict[str, float]:
        """The one dict that holds them from now on; computing its values may wait for a device."""
        if not isinstance(self._values, dict):
            self._values = dict(self._values)
        return self._values

    def __getitem__(self, name: str) -> float:
        """One value by name."""
        return self._values[name]

    def __setitem__(self, name: str, value: float) -> None:
        """Writes a value for the callbacks after this one."""
        self.to_dict()[name] = value

    def __delitem__(self, name: str) -> None:
        """Takes a value away from the callbacks after this one."""
        del self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._values)

    def __len__(self) -> int:
        """The number of values."""
        return len(self._values)


class Params(TypedDict, total=False):
    """What `fit` was asked to do. What is not known yet is None or absent.

    All callbacks of a run hold the same dict, and `fit` writes into it what it
    learns on the way (the batch size of a generator, say).

    >>> params: Params = {"epochs": 10, "steps": 235, "batch_size": 256, "examples": 60_000}
    """

    epochs: int
    steps: int | None
    """Steps in one epoch."""
    batch_size: int | None
    """Examples in one batch, across all devices."""
    examples: int | None
    """Examples in one epoch."""
    verbose: int
    """How much `fit` shows: 0, 1 or 2."""
    validated: bool
    """Whether the epoch that ends now was validated; absent if every epoch is."""


class Callback:
    """The base of every callback: override the moments you care about, the rest do nothing.

    Epochs and batches count from 0. To stop training, set
    `self.trainer.stop_training = True`: `fit` looks after every step and every epoch.

    >>> class StopBelow(Callback):
    ...     def __init__(self, loss: float) -> None:
    ...         self.loss = loss
    ...     def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
    ...         if logs["loss"] < self.loss:
    ...             self.trainer.stop_training = True
    >>> from types import SimpleNamespace
    >>> callback = StopBelow(0.1)
    >>> callback.set_trainer(SimpleNamespace(stop_training=False))
    >>> callback.on_epoch_end(0, {"loss": 0.05})
    >>> callback.trainer.stop_training
    True
    """

    # Any: a callback may use whatever the trainer offers, and the trainer imports this room.
    trainer: Any = None
    params: Params = Params()

    def set_trainer(self, trainer: Any) -> None:
        """Takes the trainer that is about to call; it stays in `self.trainer`."""
        self.trainer = trainer

    def set_params(self, params: Params) -> None:
        """Takes the plan of the run; it stays in `self.params`."""
        self.params = params

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        """Called once, before the first epoch."""

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        """Called once, after the last epoch, with what was measured in it."""

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Called before the first step of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Called after an epoch and its validation; validation's names start with `val_`."""

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        """Called before a step."""

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        """Called after a step, with the means so far in this epoch."""

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        """Called before an evaluation, also the one at the end of an epoch."""

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        """Called after an evaluation, with its values by their plain names, such as `loss`."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callback, so that a resumed run goes on in mid-count.

        Numbers, text, None, lists, tuples, dicts and numpy arrays, nothing else; and nothing that
        changes later, for it is written while training goes on. A callback that overrides
        this must be there again when the run is resumed.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave; called between `on_train_begin` and the first `on_epoch_begin`."""

    def close(self) -> None:
        """Called last, whatever happened: puts back what must not stay behind. May be called twice."""
