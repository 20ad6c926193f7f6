"""Callback: user code that `fit` calls at fixed moments.

The method names, their order and the meaning of `logs` are Keras's, so that callbacks written for Keras need few
changes. Callbacks run in the controlling process only, and see whole batches, never shards.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypedDict

from lockstep.core.arguments import check_integer
from lockstep.errors import CallbackError

Logs = Mapping[str, float]
"""Means by name. A value may be computed when it is read, so read only what you use.

All callbacks of one moment get the same mapping, in the order in which they were given. As in Keras, a value that one
of them writes into it can be read by those after it; what is written at the end of an epoch becomes a column of the
history.
"""

NO_LOGS: Logs = MappingProxyType({})


class SharedLogs(MutableMapping[str, float]):
    """The logs of one step, which callbacks can write into; each value is computed when it is first read.

    >>> logs = SharedLogs(MappingProxyType({"loss": 0.5}))
    >>> logs["mine"] = 2.0
    >>> logs.to_dict() is logs.to_dict(), dict(logs)
    (True, {'loss': 0.5, 'mine': 2.0})
    """

    def __init__(self, values: Logs) -> None:
        self._values = values

    def to_dict(self) -> dict[str, float]:
        """Compute all values, which may wait for a device, and return the one dict that holds them from now on."""
        if not isinstance(self._values, dict):
            self._values = dict(self._values)
        return self._values

    def __getitem__(self, name: str) -> float:
        """Compute and return one value."""
        return self._values[name]

    def __setitem__(self, name: str, value: float) -> None:
        """Write a value for the callbacks after this one."""
        self.to_dict()[name] = value

    def __delitem__(self, name: str) -> None:
        """Remove a value for the callbacks after this one."""
        del self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """The number of values."""
        return len(self._values)


class Params(TypedDict, total=False):
    """The arguments of `fit`. What is not known yet is None or absent.

    All callbacks of a run share one dict, and `fit` writes into it what becomes known later, such as the batch size of
    a generator.

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
    """Whether the epoch that is ending was validated; absent if every epoch is."""


class Callback:
    """Base class of callbacks. Override the moments you need; the others do nothing.

    Epochs and batches count from 0. To stop training, set `self.trainer.stop_training = True`: `fit` checks it after
    every step and every epoch.

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

    # Any: the trainer imports this module.
    trainer: Any = None
    params: Params = Params()

    def set_trainer(self, trainer: Any) -> None:
        """Store the trainer in `self.trainer`; called before every other method."""
        self.trainer = trainer

    def set_params(self, params: Params) -> None:
        """Store the arguments of `fit` in `self.params`."""
        self.params = params

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        """Called once, before the first epoch."""

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        """Called once, after the last epoch, with the values of that epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Called before the first step of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Called after an epoch and its validation; the names of validation start with `val_`."""

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        """Called before a step."""

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        """Called after a step, with the means so far in this epoch."""

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        """Called before an evaluation, also the one at the end of an epoch."""

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        """Called after an evaluation, with its values by their plain names, such as `loss`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves of the callback, so that a resumed run continues where it stopped.

        Numbers, strings, None, lists, tuples, dicts and numpy arrays, nothing else. The values must not change later,
        because they are written while training continues. A resumed run must be given the callbacks that override this.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; called between `on_train_begin` and the first `on_epoch_begin`."""

    def close(self) -> None:
        """Release what the callback holds; called last, also after an error, and possibly twice."""


def parse_every(every: int | str) -> int | None:
    """Return the number of steps between two calls, or None for once an epoch.

    >>> parse_every(100), parse_every("epoch")
    (100, None)
    """
    if isinstance(every, str) and every == "epoch":
        return None
    if isinstance(every, str):
        raise CallbackError(f"every must be 'epoch' or a number of steps. Got {every!r}. Use for example every=100.")
    return check_integer("every", every, CallbackError, least=1)
