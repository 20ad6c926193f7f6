"""Steppers: a Keras optimizer as an optimizer of the JAX backend."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from lockstep.backends.jax.optimizers import Optimizer
from lockstep.backends.keras.compiled import Compiled
from lockstep.backends.keras.optimizer_variables import OptimizerVariables
from lockstep.backends.keras_optimizer_state import RATE


class Stepper(Optimizer):
    """A Keras optimizer: its variables by name are the state."""

    donated = False  # the script's own optimizer holds the arrays

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._optimizer = compiled.model.optimizer
        self._optimizer_variables = OptimizerVariables(compiled, self._optimizer)
        self.steps = None
        self.state: Any = None
        self._published: list[Any] = []
        if self._optimizer.built:
            self.start(None)

    def stepped(self, gradients: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        """Keras's own update, inside an executable."""
        trained, own = self._compiled.trained(), self._variables()
        mapping = [(variable, params[name]) for name, variable in trained.items()]
        mapping += [(variable, state[name]) for name, variable in own.items()]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self._optimizer.apply([gradients[name] for name in trained], list(trained.values()))
        return tuple(  # type: ignore[return-value]  # two of them
            {name: scope.get_current_value(variable) for name, variable in part.items()} for part in (trained, own)
        )

    def start(self, params: Any) -> None:
        """Takes the optimizer's variables, which Keras has made."""
        if self.state is None:
            self.state = {name: variable.value for name, variable in self._variables().items()}
            self._published = self._held()

    def publish(self, state: Any, steps: int | None) -> None:
        """Puts the arrays into the script's own optimizer."""
        self.state = state
        for name, variable in self._variables().items():
            variable._direct_assign(state[name])
        self._published = self._held()

    def changed(self) -> bool:
        """Whether the script has put other arrays there; takes them over."""
        if self.state is None:
            return False
        if all(one is other for one, other in zip(self._held(), self._published, strict=True)):
            return False
        self.state = None
        self.start(None)
        return True

    def held(self) -> list[Any]:
        """The optimizer's arrays, without the learning rate, which `controls` carry."""
        if not self._optimizer.built:
            return []
        return [variable.value for variable in self._optimizer_variables.variables().values()]

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers that the optimizer was made with."""
        return self._optimizer_variables.numbers()

    def want(self, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Writes them into the optimizer, which holds them until the first batch."""
        self._optimizer_variables.set_numbers(numbers)

    def with_numbers(self, numbers: Sequence[Mapping[str, Any]]) -> Any:
        """Writes them into the optimizer; the state then is the one with them."""
        self._optimizer_variables.set_numbers(numbers)
        self.changed()
        return self.state

    def _variables(self) -> dict[str, Any]:
        """The optimizer's variables by name, the learning rate among them: an executable takes it as an argument."""
        found = {name.removeprefix("optimizer."): each for name, each in self._optimizer_variables.variables().items()}
        return found | {each.name: each for each in self._optimizer.variables if each.name == RATE}

    def _held(self) -> list[Any]:
        return [variable.value for variable in self._variables().values()]
