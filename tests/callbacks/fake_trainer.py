"""A stage for callbacks: a trainer that has no model to train, and a `fit` that follows a script of values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.backends.base import Array
from lockstep.callbacks import Callback, Chain, History


class Stage:
    """Whatever callbacks ask of a trainer. Its one weight is the number of steps made."""

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
    stage: Stage,
    callbacks: Sequence[Callback],
    epochs: Sequence[Mapping[str, float]],
    *,
    first: int = 0,
    steps: int = 2,
    state: Any = None,
) -> Any:
    """Plays the epochs, as `fit` does, from epoch `first` on, and gives the callbacks' state at the end.

    With a `state`, as a resumed `fit` does.
    """
    chain = Chain(callbacks, stage, {"epochs": first + len(epochs), "steps": steps})
    stage.stop_training = False
    logs: Mapping[str, float] = {}
    try:
        chain.on_train_begin()
        if state is not None:
            chain.load_state_dict(state)
        for epoch, logs in enumerate(epochs, start=first):
            chain.on_epoch_begin(epoch)
            for batch in range(steps):
                chain.on_train_batch_begin(batch)
                stage.step()
                chain.on_train_batch_end(batch, logs)
            stage.history.record(epoch, logs, seconds=1.0)
            chain.on_epoch_end(epoch, logs)
            if stage.stop_training:
                break
        saved = chain.state_dict()
        chain.on_train_end(logs)
    finally:
        chain.close()
    return saved


def epochs(name: str, values: Sequence[float]) -> list[dict[str, float]]:
    """Epochs in which one metric took these values."""
    return [{name: value} for value in values]
