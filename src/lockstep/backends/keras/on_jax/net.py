"""Nets: a Keras model's variables, as the JAX backend's parameters and the rest."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lockstep.backends.jax.train_mode import ModuleModes
from lockstep.backends.keras.compiled import Compiled, Outcome, Values
from lockstep.backends.keras.optimizer_variables import OptimizerVariables
from lockstep.errors import ModelError


class Net:
    """A Keras model's variables, by name, as the JAX backend's parameters and the rest."""

    home = "model"
    donated = False  # the script's own variables hold the arrays
    mode_flags: ModuleModes | None = None

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.params: Any = None
        self.rest: Any = None
        self._trained: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._published: list[Any] = []
        if compiled.model.built:
            self._read()

    def _read(self) -> None:
        compiled = self._compiled
        self._trained, self._kept = compiled.trained(), {**compiled.kept(), **compiled.others()}
        self.params = {name: variable.value for name, variable in self._trained.items()}
        self.rest = {name: variable.value for name, variable in self._kept.items()}
        self._published = self.held()

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> "BoundNet":
        """The model with these variables and seeds out of a shard's own key."""
        return BoundNet(self._compiled, params, rest, key, training)

    def start(self, inputs: Any, key: Any) -> None:
        """Makes the variables of a model that waits for its first examples."""
        self._compiled.build(jax.tree.map(np.asarray, inputs))
        self._read()

    def publish(self, params: Any, rest: Any) -> None:
        """Puts the arrays into the script's own variables."""
        self.params, self.rest = params, rest
        for variables, values in ((self._trained, params), (self._kept, rest)):
            for name, variable in variables.items():
                variable._direct_assign(values[name])
        self._published = self.held()

    def changed(self) -> bool:
        """Whether a variable holds another array than the one put there; takes it over."""
        if all(one is other for one, other in zip(self.held(), self._published, strict=True)):
            return False
        self._read()
        return True

    def held(self) -> list[Any]:
        """The arrays in the script's own variables."""
        return [variable.value for variable in (*self._trained.values(), *self._kept.values())]

    def signature(self) -> Any:
        """What is a constant to an executable; which layers train is to stay."""
        self._compiled.look()
        if self.params is not None and list(self._compiled.trained()) != list(self._trained):
            raise ModelError(
                "On JAX a model trains the layers that it was wrapped with. Some were frozen or thawed since. "
                "Call lockstep.wrap again after changing `trainable`."
            )
        numbers = OptimizerVariables(self._compiled, self._compiled.model.optimizer).constants()
        return (*numbers.items(), *self._compiled.form)

    def controls(self) -> Any:
        """Nothing: the optimizer's numbers are all that travels."""

    def turn(self, controls: Any) -> None:
        """There is nothing to turn."""


class BoundNet:
    """The model inside a shard's executable; calls in turn see what the earlier ones have kept."""

    def __init__(self, compiled: Compiled, params: Any, rest: Any, key: Any, training: bool) -> None:
        self._compiled, self._params, self._rest, self._training = compiled, params, rest, training
        numbers = [jax.random.key_data(jax.random.fold_in(key, i)) for i, _ in enumerate(compiled.generators())]
        self._seeds = [each.astype(state.dtype) for each, state in zip(numbers, compiled.generators(), strict=True)]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The outputs; Keras takes several inputs as one nest."""
        given = named or (inputs if len(inputs) > 1 else inputs[0])
        outputs, kept = self._compiled.called(self._values(), given, self._training)
        self._keep(kept)
        return outputs

    def outcome(self, batch: Any) -> Outcome:
        """The compiled loss and metrics of a shard."""
        found = self._compiled.run(self._values(), batch, self._training)
        self._keep(found.kept)
        return found

    def others(self) -> Any:
        """The variables that are not trained, as the calls have left them."""
        return self._rest

    def _values(self) -> Values:
        names = self._compiled.trained(), self._compiled.kept(), self._compiled.others()
        trained, kept, others = (
            [nest[name] for name in part]
            for part, nest in zip(names, (self._params, self._rest, self._rest), strict=True)
        )
        return Values(trained, kept, self._seeds, others)

    def _keep(self, kept: Sequence[Any]) -> None:
        self._rest = {**self._rest, **dict(zip(self._compiled.kept(), kept, strict=True))}
