"""A Keras optimizer with the interface of the JAX backend's optimizers."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from lockstep.backends import keras_optimizer_state
from lockstep.backends.jax.optimizers import Optimizer
from lockstep.backends.keras.stateless_model import CompiledModel
from lockstep.backends.keras_optimizer_state import RATE


class KerasJaxOptimizer(Optimizer):
    """A Keras optimizer, whose state is its variables by name."""

    may_donate = False  # updates must not reuse the memory of the arrays, which the script's optimizer contains, too

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self._optimizer = compiled.model.optimizer
        self.steps = None
        self.state: Any = None
        self._published: list[Any] = []
        if self._optimizer.built:
            self.create_state(None)

    def compute_step(self, gradients: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        """Returns the parameters and the optimizer state after Keras's own update; called in a traced function."""
        trainable, state_variables = self._compiled.trainable, self._name_variables()
        mapping = [(variable, params[name]) for name, variable in trainable.items()]
        mapping += [(variable, state[name]) for name, variable in state_variables.items()]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self._optimizer.apply([gradients[name] for name in trainable], list(trainable.values()))
        return tuple(  # type: ignore[return-value]  # it has two entries
            {name: scope.get_current_value(variable) for name, variable in part.items()}
            for part in (trainable, state_variables)
        )

    def create_state(self, params: Any) -> None:
        """Reads the optimizer's variables, which Keras has created, unless they were read before."""
        if self.state is None:
            self.state = {name: variable.value for name, variable in self._name_variables().items()}
            self._published = self._read_arrays()

    def publish(self, state: Any, steps: int | None) -> None:
        """Assigns the arrays to the variables of the script's optimizer."""
        self.state = state
        for name, variable in self._name_variables().items():
            variable._direct_assign(state[name])
        self._published = self._read_arrays()

    def read_changes(self) -> bool:
        """Reads all variables again if the script has assigned an array to one; returns whether it has."""
        if self.state is None:
            return False
        if all(one is other for one, other in zip(self._read_arrays(), self._published, strict=True)):
            return False
        self.state = None
        self.create_state(None)
        return True

    def list_arrays(self) -> list[Any]:
        """Returns the optimizer's arrays, without the learning rate, which is a hyperparameter."""
        if not self._optimizer.built:
            return []
        named = keras_optimizer_state.name_variables(self._optimizer, self._compiled.weights)
        return [variable.value for variable in named.values()]

    def read_hyperparams(self) -> list[dict[str, Any]]:
        """Returns the optimizer's hyperparameters as a list of one group."""
        return keras_optimizer_state.read_hyperparameters(self._optimizer)

    def defer_hyperparams(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Writes hyperparameters into the Keras optimizer, whose variables need not exist yet."""
        keras_optimizer_state.write_hyperparameters(self._optimizer, groups)

    def replace_hyperparams(self, groups: Sequence[Mapping[str, Any]]) -> Any:
        """Writes hyperparameters into the Keras optimizer, and returns the optimizer state with the new values."""
        self.defer_hyperparams(groups)
        self.read_changes()
        return self.state

    def _name_variables(self) -> dict[str, Any]:
        """Returns the optimizer's variables by name, including the learning rate, which traced functions read."""
        named = keras_optimizer_state.name_variables(self._optimizer, self._compiled.weights)
        return named | {each.name: each for each in self._optimizer.variables if each.name == RATE}

    def _read_arrays(self) -> list[Any]:
        return [variable.value for variable in self._name_variables().values()]
