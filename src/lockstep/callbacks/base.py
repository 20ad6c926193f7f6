"""The base class of callbacks, whose methods `fit` calls at fixed moments.

The names and the order of the methods, and the meaning of `logs`, are the same as in Keras, so that callbacks written
for Keras need few changes. Callbacks run in the controller only, and see whole batches, never shards.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypedDict

from lockstep.core.arguments import check_integer
from lockstep.errors import CallbackError

Logs = Mapping[str, float]
"""The means of loss and metrics by name. A value may be computed when it is read, so read only the values you need.

All callbacks get the same mapping, one after another. As in Keras, a callback can write a value into the mapping, which
the callbacks after it can read. A value that is written at the end of an epoch becomes a column of the history.
"""

NO_LOGS: Logs = MappingProxyType({})


class SharedLogs(MutableMapping[str, float]):
    """The logs of one step, into which callbacks can write; each value is computed when it is first read.

    >>> logs = SharedLogs(MappingProxyType({"loss": 0.5}))
    >>> logs["mine"] = 2.0
    >>> logs.to_dict() is logs.to_dict(), dict(logs)
    (True, {'loss': 0.5, 'mine': 2.0})
    """

    def __init__(self, values: Logs) -> None:
        self._values = values

    def to_dict(self) -> dict[str, float]:
        """Returns all values as a dict, the same dict in every call; computing them may wait for a device."""
        if not isinstance(self._values, dict):
            self._values = dict(self._values)
        return self._values

    def __getitem__(self, name: str) -> float:
        """Returns the value of this name, which is computed when it is first read."""
        return self._values[name]

    def __setitem__(self, name: str, value: float) -> None:
        """Writes a value, which later callbacks can read."""
        self.to_dict()[name] = value

    def __delitem__(self, name: str) -> None:
        """Removes a value, which later callbacks then cannot read."""
        del self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Returns the number of values."""
        return len(self._values)


class Params(TypedDict, total=False):
    """The arguments of `fit` and the size of its data. A value that is not known yet is None or absent.

    All callbacks of a run share one dict, into which `fit` writes values that become known later, such as the batch
    size of a generator.

    >>> params: Params = {"epochs": 10, "steps": 235, "batch_size": 256, "examples": 60_000}
    """

    epochs: int
    steps: int | None
    """The number of steps in one epoch."""
    batch_size: int | None
    """The number of examples in one batch, over all devices."""
    examples: int | None
    """The number of examples in one epoch."""
    verbose: int
    """How much `fit` prints: 0, 1 or 2."""
    validated: bool
    """Whether `fit` validates at the end of the current epoch; absent without validation data."""


class Callback:
    """The base class of callbacks. Override the methods you need; all other methods do nothing.

    Epochs and batches count from 0. To stop training, set `self.trainer.stop_training = True`: `fit` checks it after
    every step and every epoch.

    >>> class StopBelow(Callback):
    ...     def __init__(self, loss: float) -> None:
    ...         self.loss = loss
    ...     def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
    ...         if logs["loss"] < self.loss:
    ...             self.trainer.stop_training = True
    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> with lockstep.wrap(net, sgd, loss) as trainer:
    ...     history = trainer.fit((x, y), epochs=100, callbacks=[StopBelow(0.1)], verbose=0)
    >>> len(history.epoch) < 100, history["loss"][-1] < 0.1
    (True, True)
    """

    # Any: the trainer imports this module.
    trainer: Any = None
    params: Params = Params()

    def set_trainer(self, trainer: Any) -> None:
        """Stores the trainer in `self.trainer`; called before every other method."""
        self.trainer = trainer

    def set_params(self, params: Params) -> None:
        """Stores the arguments of `fit` in `self.params`."""
        self.params = params

    def on_train_begin(self, logs: Logs = NO_LOGS) -> None:
        """Called once, before the first epoch."""

    def on_train_end(self, logs: Logs = NO_LOGS) -> None:
        """Called once, after the last epoch, with the logs of this epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Called before the first step of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs = NO_LOGS) -> None:
        """Called after an epoch and its validation; the names of validation values in `logs` begin with `val_`."""

    def on_train_batch_begin(self, batch: int, logs: Logs = NO_LOGS) -> None:
        """Called before a step."""

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        """Called after a step, with the means over the steps of this epoch so far."""

    def on_test_begin(self, logs: Logs = NO_LOGS) -> None:
        """Called before the validation at the end of an epoch."""

    def on_test_end(self, logs: Logs = NO_LOGS) -> None:
        """Called after the validation, with its values under names without `val_`, such as `loss`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint, from which a resumed run continues.

        The state may contain numbers, strings, None, lists, tuples, dicts and numpy arrays. These must not change
        later, because they are written while training continues. A resumed run must be given all callbacks that
        override this method.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned; called between `on_train_begin` and the first `on_epoch_begin`."""

    def close(self) -> None:
        """Releases the callback's files and other resources; called last, even after an error, and possibly twice."""


def parse_every(every: int | str) -> int | None:
    """Returns the argument `every` as a number of steps; None for "epoch", which means once per epoch.

    >>> parse_every(100), parse_every("epoch")
    (100, None)
    """
    if isinstance(every, str) and every == "epoch":
        return None
    if isinstance(every, str):
        raise CallbackError(f"every must be 'epoch' or a number of steps. Got {every!r}. Use for example every=100.")
    return check_integer("every", every, CallbackError, least=1)
