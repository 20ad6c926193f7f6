"""The variables of a Keras optimizer as part of the state, on whatever Keras runs on."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from lockstep.backends import keras_optimizer_state
from lockstep.backends.base import Array, State
from lockstep.backends.keras.compiled import Compiled
from lockstep.core.state import ArraySpec


class OptimizerVariables:
    """The variables of a compiled model's optimizer, without the learning rate, which is a plain number."""

    def __init__(self, compiled: Compiled, optimizer: Any) -> None:
        self._compiled = compiled
        self._optimizer = optimizer

    def variables(self) -> dict[str, Any]:
        """Return the variables by their names in the state: a weight's name, then the variable's own."""
        found = keras_optimizer_state.name_variables(self._optimizer, self._compiled.weights())
        return {f"optimizer.{name}": variable for name, variable in found.items()}

    def read(self) -> State:
        """Copy every variable."""
        found = {name: np.array(ops.convert_to_numpy(each.value)) for name, each in self.variables().items()}
        return {name: Array(data, data.dtype.name) for name, data in found.items()}

    def specs(self) -> dict[str, ArraySpec]:
        """Describe the arrays that a saved state must have."""
        found = self.variables().items()
        return {name: ArraySpec(tuple(each.shape), keras.backend.standardize_dtype(each.dtype)) for name, each in found}

    def write(self, state: Mapping[str, Array]) -> None:
        """Write the arrays of a state that fits."""
        for name, variable in self.variables().items():
            variable.assign(state[name].data)

    def numbers(self) -> list[dict[str, Any]]:
        """Return one group: the learning rate, and every number that the optimizer was made with."""
        return keras_optimizer_state.read_numbers(self._optimizer)

    def constants(self) -> dict[str, Any]:
        """Return the numbers that a traced update holds as constants."""
        return keras_optimizer_state.read_constants(self._optimizer)

    def set_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Write such numbers; if there is a schedule, it still sets the learning rate."""
        keras_optimizer_state.set_numbers(self._optimizer, numbers)
