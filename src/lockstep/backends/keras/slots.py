"""Slots: the variables of a model's optimizer as part of its state, on whatever Keras runs on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops

from lockstep.backends import keras_optimizer_state
from lockstep.backends.base import Array, State
from lockstep.backends.keras.compiled import Compiled
from lockstep.errors import StateError


class Slots:
    """What an optimizer keeps beside the learning rate, which is a plain number."""

    def __init__(self, compiled: Compiled, optimizer: Any) -> None:
        self._compiled = compiled
        self._optimizer = optimizer

    def variables(self) -> dict[str, Any]:
        """The optimizer's variables: those of a weight under its name, with their own."""
        found = keras_optimizer_state.of(self._optimizer, self._compiled.weights())
        return {f"optimizer.{name}": variable for name, variable in found.items()}

    def read(self) -> State:
        """A copy of each."""
        found = {name: np.array(ops.convert_to_numpy(each.value)) for name, each in self.variables().items()}
        return {name: Array(data, data.dtype.name) for name, data in found.items()}

    def check(self, state: Mapping[str, Array]) -> None:
        """Refuses a state of another optimizer."""
        own = self.variables()
        theirs = {name: array for name, array in state.items() if name.startswith("optimizer.")}
        for name in sorted(own.keys() | theirs.keys()):
            short = name.partition(".")[2]
            there = theirs[name].data.shape if name in theirs else "nothing"
            here = tuple(own[name].shape) if name in own else "nothing"
            if there != here:
                raise StateError(
                    f"The state does not fit this optimizer. At {short!r} it has {there}, the optimizer {here}. "
                    "Load the state of this model and optimizer."
                )

    def write(self, state: Mapping[str, Array]) -> None:
        """Takes over each."""
        for name, variable in self.variables().items():
            variable.assign(state[name].data)

    def numbers(self) -> list[dict[str, Any]]:
        """One group: the learning rate, and every number that the optimizer was made with."""
        return keras_optimizer_state.numbers(self._optimizer)

    def constants(self) -> dict[str, Any]:
        """The numbers that a traced update holds as constants."""
        return keras_optimizer_state.constants(self._optimizer)

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them; a schedule keeps its say over the learning rate."""
        keras_optimizer_state.set_numbers(self._optimizer, numbers)
