"""A trainer without a model, for tests of callbacks, and a `fit` that reports given values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.callbacks import Callback, CallbackList, History
from lockstep.core.types import Array


class FakeTrainer:
    """What callbacks use of a trainer. Its one weight is the number of steps made."""

    def __init__(self, learning_rates: tuple[float, ...] = (0.1,)) -> None:
        self.num_steps = 0
        self.learning_rates = learning_rates
        self.stop_training = False
        self.history = History()
        self.opening = self.resumed = ""
        self.breakdown = None
        self.runs_callbacks = True
        self.arrays = {
            "model.weight": Array(np.zeros(2, "float32"), "float32"),
            "model.count": Array(np.array(0), "int64"),
            "optimizer.weight.momentum": Array(np.zeros(2), "float64"),
        }

    def state(self) -> dict[str, Array]:
        return {name: Array(data.copy(), dtype) for name, (data, dtype) in self.arrays.items()}

    def model_arrays(self) -> dict[str, Any]:
        return {name: data for name, (data, _) in self.arrays.items() if name.startswith("model.")}

    def load_state(self, state: Mapping[str, Array]) -> None:
        assert state.keys() == self.arrays.keys()
        self.arrays = {name: Array(data.copy(), dtype) for name, (data, dtype) in state.items()}

    def step(self) -> None:
        self.num_steps += 1
        for data, _ in self.arrays.values():
            data[...] = self.num_steps

    @property
    def weight(self) -> float:
        return float(self.arrays["model.weight"].data[0])

    @property
    def momentum(self) -> float:
        return float(self.arrays["optimizer.weight.momentum"].data[0])


def fit(
    trainer: FakeTrainer,
    callbacks: Sequence[Callback],
    epochs: Sequence[Mapping[str, float]],
    *,
    first: int = 0,
    steps: int = 2,
    state: Any = None,
) -> Any:
    """Call the callbacks as `fit` does, from epoch `first` on, and return their state at the end.

    With a `state`, as a resumed `fit` does.
    """
    chain = CallbackList(callbacks, trainer, {"epochs": first + len(epochs), "steps": steps})
    trainer.stop_training = False
    logs: Mapping[str, float] = {}
    try:
        chain.on_train_begin()
        if state is not None:
            chain.load_state_dict(state)
        for epoch, logs in enumerate(epochs, start=first):
            chain.on_epoch_begin(epoch)
            for batch in range(steps):
                chain.on_train_batch_begin(batch)
                trainer.step()
                chain.on_train_batch_end(batch, logs)
            trainer.history.record(epoch, logs, seconds=1.0)
            chain.on_epoch_end(epoch, logs)
            if trainer.stop_training:
                break
        saved = chain.state_dict()
        chain.on_train_end(logs)
    finally:
        chain.close()
    return saved


def epochs(name: str, values: Sequence[float]) -> list[dict[str, float]]:
    """Epochs in which one metric took these values."""
    return [{name: value} for value in values]
