"""The variables of a Keras optimizer as arrays of a state, read and written with Keras alone."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from lockstep.backends import keras_optimizer_state
from lockstep.backends.keras.stateless_model import CompiledModel
from lockstep.core.state import ArraySpec
from lockstep.core.types import Array, State


class OptimizerVariables:
    """The variables of a compiled model's optimizer, without the learning rate, which is a hyperparameter."""

    def __init__(self, compiled: CompiledModel, optimizer: Any) -> None:
        self._compiled = compiled
        self._optimizer = optimizer

    def name_variables(self) -> dict[str, Any]:
        """Returns the variables by their names in the state: a weight's name, then the variable's own."""
        named = keras_optimizer_state.name_variables(self._optimizer, self._compiled.weights)
        return {f"optimizer.{name}": variable for name, variable in named.items()}

    def read(self) -> State:
        """Returns a numpy copy of every variable, by name."""
        arrays = {name: np.array(ops.convert_to_numpy(each.value)) for name, each in self.name_variables().items()}
        return {name: Array(data, data.dtype.name) for name, data in arrays.items()}

    def read_specs(self) -> dict[str, ArraySpec]:
        """Returns the shapes and dtypes that the arrays of a saved state must have."""
        return {
            name: ArraySpec(tuple(each.shape), keras.backend.standardize_dtype(each.dtype))
            for name, each in self.name_variables().items()
        }

    def write(self, state: Mapping[str, Array]) -> None:
        """Writes the arrays of a state into the variables; the state was checked before."""
        for name, variable in self.name_variables().items():
            variable.assign(state[name].data)
