"""Averages the model over the last steps (EMA), which often generalizes better than the weights of the last step.

The averages are kept on the device of the first replica and updated by the framework's own operations, so no step
copies the model to the host. They are float32 or wider, because adding 1/1000 of a value to a bfloat16 has no effect.
Each product and each sum is rounded separately, which gives the same bits in every framework.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends import registry
from lockstep.backends.array_ops import ArrayOps, name_dtype
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_integer, check_number
from lockstep.core.low_precision import is_float, narrow
from lockstep.core.types import Array
from lockstep.errors import CallbackError, StateError

Shapes = Mapping[str, tuple[int, ...]]


class EMA(Callback):
    """An exponential moving average of the model: `average = decay * average + (1 - decay) * value`.

    The average is updated after every `every`-th step of the run. `decay` is the weight of the old average in one
    update: to average over the same number of steps with `every=10`, give `decay**10`. The first update copies the
    model. Running statistics are averaged too; integers are copied. A second `fit` continues the average.

    >>> import lockstep, torch
    >>> x, y = torch.eye(8), torch.arange(8) % 2
    >>> net = torch.nn.Linear(8, 2)
    >>> sgd, loss = torch.optim.SGD(net.parameters(), lr=0.5), torch.nn.CrossEntropyLoss()
    >>> ema = EMA(0.9)
    >>> with lockstep.wrap(net, sgd, loss) as trainer:
    ...     history = trainer.fit((x, y), epochs=3, callbacks=[ema], verbose=0)
    ...     own = trainer.evaluate((x, y))["loss"]
    ...     with ema.applied():
    ...         averaged = trainer.evaluate((x, y))["loss"]
    >>> list(ema.arrays), averaged > own
    (['model.weight', 'model.bias'], True)
    """

    def __init__(self, decay: float, every: int = 1) -> None:
        check_number("decay", decay, CallbackError, 0.999)
        if not 0 <= decay < 1:
            raise CallbackError(
                f"decay, the weight of the old average, must be 0 or more and below 1. Got {decay}. Use for example "
                "decay=0.999."
            )
        self.decay = decay
        self.every = check_integer("every", every, CallbackError, least=1)
        self._averages: dict[str, Any] = {}  # the framework's own arrays, on the device of the first replica
        self._loaded: dict[str, NDArray[Any]] = {}  # averages from a checkpoint, until the next update

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Copies of the averages as numpy arrays, under the same names as in `trainer.state()`."""
        if self._loaded:
            return {name: data.copy() for name, data in self._loaded.items()}
        return {name: _find_ops(average).to_numpy(average) for name, average in self._averages.items()}

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.trainer.num_steps % self.every == 0:
            self._update(self.trainer.model_arrays())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Returns a context in which the model has the averaged weights, for evaluation or saving.

        The model's own weights are restored at the end of the block. Raises `CallbackError` if no step has updated the
        averages yet.
        """
        if self.trainer is not None and not self.trainer.runs_callbacks:
            yield  # the process that runs the callbacks loads and restores the weights of all processes
            return
        averages = self.arrays
        if not averages:
            raise CallbackError(
                "This EMA has no averages yet, because no step has updated it. Call trainer.fit(..., callbacks=[ema]) "
                "before ema.applied()."
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
        return {"arrays": self.arrays}  # copies, because the averages change while the checkpoint is being written

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
        if floats:  # in one call, because a framework computes a list of arrays in fewer kernels
            averages, newest = [self._averages[name] for name in floats], [values[name] for name in floats]
            updated = _find_ops(newest[0]).update_averages(averages, newest, self.decay)
            self._averages.update(zip(floats, updated, strict=True))


def _find_ops(array: Any) -> ArrayOps:
    """Returns the array operations of the framework that the array belongs to."""
    home = registry.find_array_backend(array)
    assert home is not None
    return registry.load_array_ops(home)


def _get_shapes(arrays: Mapping[str, Any]) -> Shapes:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _check_shapes(averages: Shapes, model: Shapes) -> None:
    """Raises StateError if the names or shapes of the model's arrays differ from those of the averages."""
    for name in sorted(model.keys() | averages.keys()):
        if model.get(name) != averages.get(name):
            raise StateError(
                f"This EMA averages another model: {name!r} is {averages.get(name, 'missing')} in the EMA and "
                f"{model.get(name, 'missing')} in the model. Use a new EMA for this model."
            )
