"""EMA: the model averaged over the last steps, which often generalizes better than the last step's weights.

The averages stay on the device of the first replica and are updated by the framework's own operations, so no step
copies the model to the host. They are float32 or wider, because bfloat16 cannot take up 1/1000 of a value. Products
and sum are rounded one by one, which gives the same bits in every framework.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends import registry
from lockstep.backends.array_ops import ArrayOps, name_dtype
from lockstep.backends.base import Array
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_integer, check_number
from lockstep.core.low_precision import is_float, narrow
from lockstep.errors import CallbackError, StateError

Shapes = Mapping[str, tuple[int, ...]]


class EMA(Callback):
    """An exponential moving average of the model: `average = decay * average + (1 - decay) * value`.

    Updated after every `every`-th step of the run, with the same `decay` whatever `every` is: for the same reach at
    `every=10`, give `decay**10`. The first update copies. Running statistics are averaged too; of integers the newest
    value is kept. An EMA continues through several `fit`s.

    >>> import lockstep, numpy as np
    >>> from lockstep.backends.numpy import SGD, Dense
    >>> x, y = np.eye(8), np.arange(8) % 2
    >>> ema = EMA(0.9)
    >>> with lockstep.wrap(Dense([8, 2], seed=1), SGD(0.5), "cross_entropy") as trainer:
    ...     history = trainer.fit((x, y), epochs=3, callbacks=[ema], verbose=0)
    ...     own = trainer.evaluate((x, y))["loss"]
    ...     with ema.applied():
    ...         averaged = trainer.evaluate((x, y))["loss"]
    >>> list(ema.arrays), averaged > own
    (['model.0.weight', 'model.0.bias'], True)
    """

    def __init__(self, decay: float, every: int = 1) -> None:
        check_number("decay", decay, CallbackError, 0.999)
        if not 0 <= decay < 1:
            raise CallbackError(
                f"decay must be 0 or more and below 1: it is the weight of the old average. Got {decay}. "
                "Use for example decay=0.999."
            )
        self.decay = decay
        self.every = check_integer("every", every, CallbackError, least=1)
        self._averages: dict[str, Any] = {}  # the framework's own arrays, on the device of the first replica
        self._loaded: dict[str, NDArray[Any]] = {}  # from a checkpoint, until the next update puts them on the device

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the averages as numpy arrays, by the names of `trainer.state()`."""
        if self._loaded:
            return {name: data.copy() for name, data in self._loaded.items()}
        return {name: _find_ops(average).to_numpy(average) for name, average in self._averages.items()}

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.trainer.num_steps % self.every == 0:
            self._update(self.trainer.model_arrays())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages within the block, to evaluate, predict or save it; then its own values again."""
        if self.trainer is not None and not self.trainer.runs_callbacks:
            yield  # the process that runs the callbacks loads the averages for all, and the model's own values again
            return
        averages = self.arrays
        if not averages:
            raise CallbackError(
                "This EMA has no averages yet: it gets them at its first update. "
                "Call trainer.fit(..., callbacks=[ema]) before ema.applied()."
            )
        own = self.trainer.state()
        _check_shapes(
            {name: average.shape for name, average in averages.items()},
            {name: array.data.shape for name, array in own.items() if name.startswith("model.")},
        )
        narrowed = {name: Array(narrow(data, own[name].dtype), own[name].dtype) for name, data in averages.items()}
        self.trainer.load_state({**own, **narrowed})
        try:
            yield
        finally:
            self.trainer.load_state(own)

    def state_dict(self) -> dict[str, Any]:
        return {"arrays": self.arrays}  # copies: the averages change while the checkpoint is being written

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages = {}
        self._loaded = {name: np.array(average) for name, average in state["arrays"].items()}

    def _update(self, values: Mapping[str, Any]) -> None:
        if self._loaded:
            _check_shapes(_get_shapes(self._loaded), _get_shapes(values))
            self._averages = {
                name: _find_ops(values[name]).from_numpy(data, values[name]) for name, data in self._loaded.items()
            }
            self._loaded = {}
        if not self._averages:
            self._averages = {name: _find_ops(value).widen(value) for name, value in values.items()}
            return
        _check_shapes(_get_shapes(self._averages), _get_shapes(values))
        floats = []
        for name, value in values.items():
            if is_float(name_dtype(self._averages[name])):
                floats.append(name)
            else:
                self._averages[name] = _find_ops(value).widen(value)
        if floats:  # all at once, because a framework computes a list of arrays in fewer kernels
            averages, newest = [self._averages[name] for name in floats], [values[name] for name in floats]
            updated = _find_ops(newest[0]).update_averages(averages, newest, self.decay)
            self._averages.update(zip(floats, updated, strict=True))


def _find_ops(array: Any) -> ArrayOps:
    """The operations of the framework that the array belongs to."""
    home = registry.home_of(array)
    assert home is not None
    return registry.arrays(home)


def _get_shapes(arrays: Mapping[str, Any]) -> Shapes:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _check_shapes(averages: Shapes, model: Shapes) -> None:
    """Raise if the model has other arrays than those that were averaged."""
    for name in sorted(model.keys() | averages.keys()):
        if model.get(name) != averages.get(name):
            raise StateError(
                f"This EMA averages another model: at {name!r} it has {averages.get(name, 'nothing')}, "
                f"the model {model.get(name, 'nothing')}. Use a new EMA for this model."
            )
