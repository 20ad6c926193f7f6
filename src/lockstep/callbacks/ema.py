"""EMA: the model averaged over the last steps, often better than where the last step left it.

The averages live in numpy on the host, in float32 or wider. A narrow type could not
take up 1/1000 of a value, and numpy gives the same bits on every machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.backends.base import Array
from lockstep.callbacks import weights
from lockstep.callbacks.arguments import whole
from lockstep.callbacks.base import NO_LOGS, Callback, Logs
from lockstep.core.arguments import check_number
from lockstep.core.low_precision import is_float, narrow, widen
from lockstep.errors import CallbackError, StateError


class EMA(Callback):
    """An exponential moving average of the model: `average = decay * average + (1 - decay) * value`.

    Updated after every `every`-th step of the run, with the same `decay` whatever `every` is: for
    the same reach at `every=10`, give `decay**10`. The first update copies. Running statistics
    are averaged too, whole numbers are the newest. An EMA goes on through several `fit`s.

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
            raise CallbackError(f"decay is the weight of the old average: 0 or more, below 1. Got {decay}. Use 0.999.")
        self.decay = decay
        self.every = whole("every", every, least=1)
        self.arrays: dict[str, NDArray[Any]] = {}
        """The averages, by the names of `trainer.state()`."""

    def on_train_batch_end(self, batch: int, logs: Logs = NO_LOGS) -> None:
        if self.trainer.num_steps % self.every == 0:
            self._update(weights.take(self.trainer))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the averages: evaluate, predict or save it. Afterwards all is as it was before."""
        if self.trainer is not None and not self.trainer.runs_callbacks:
            yield  # the averages, and the model's own weights again, come from the process that has them
            return
        if not self.arrays:
            raise CallbackError(
                "An EMA has averages after its first update. Got none yet. "
                "Call trainer.fit(..., callbacks=[ema]) before ema.applied()."
            )
        own = self.trainer.state()
        self._check(own)
        averages = {
            name: Array(narrow(average, own[name].dtype), own[name].dtype) for name, average in self.arrays.items()
        }
        self.trainer.load_state({**own, **averages})
        try:
            yield
        finally:
            self.trainer.load_state(own)

    def state_dict(self) -> dict[str, Any]:
        # Copies: the averages change in place while the checkpoint is being written.
        return {"arrays": {name: average.copy() for name, average in self.arrays.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arrays = {name: np.array(average) for name, average in state["arrays"].items()}

    def _update(self, model: dict[str, Array]) -> None:
        first = not self.arrays
        if not first:
            self._check(model)
        for name, (data, dtype) in model.items():
            # The trainer's copy is ours: it is kept, or serves as the room to compute in.
            value = widen(data, dtype) if is_float(dtype) else data
            if first or not is_float(dtype):
                self.arrays[name] = value
            else:
                average = self.arrays[name]
                average *= self.decay
                value *= 1 - self.decay
                average += value

    def _check(self, state: dict[str, Array]) -> None:
        """Stops where the model is another than the averaged one."""
        here = {name: array.data.shape for name, array in state.items() if name.startswith(weights.MODEL)}
        own = {name: average.shape for name, average in self.arrays.items()}
        for name in sorted(here.keys() | own.keys()):
            if here.get(name) != own.get(name):
                raise StateError(
                    f"An EMA averages one model. At {name!r} it has {own.get(name, 'nothing')}, "
                    f"the model {here.get(name, 'nothing')}. Use a new EMA for this model."
                )
