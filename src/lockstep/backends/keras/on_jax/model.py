"""A Keras model with the JAX backend's interface of models, `backends/jax/models.py`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lockstep.backends import keras_optimizer_state
from lockstep.backends.jax.train_mode import ModuleModes
from lockstep.backends.keras.stateless_model import CompiledModel, ShardResult, VariableValues
from lockstep.errors import ModelError


class KerasJaxModel:
    """A Keras model's variables by name: trainable variables as `params`, all other variables as `rest`."""

    params_prefix = "model"
    may_donate = False  # updates must not reuse the memory of the arrays, which the script's variables contain, too
    mode_flags: ModuleModes | None = None

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self.params: Any = None
        self.rest: Any = None
        self._trainable: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._published: list[Any] = []
        if compiled.model.built:
            self._read_variables()

    def _read_variables(self) -> None:
        """Reads the arrays in the script's variables."""
        compiled = self._compiled
        self._trainable, self._others = compiled.trainable, {**compiled.statistics, **compiled.frozen}
        self.params = {name: variable.value for name, variable in self._trainable.items()}
        self.rest = {name: variable.value for name, variable in self._others.items()}
        self._published = self.list_arrays()

    def bind(self, params: Any, rest: Any, key: Any, training: bool) -> "BoundKerasModel":
        """Returns the model with these variables, and with seeds that follow from a shard's own key."""
        return BoundKerasModel(self._compiled, params, rest, key, training)

    def create_variables(self, inputs: Any, key: Any) -> None:
        """Creates the variables of a model that is not built yet, from the first batch's inputs."""
        self._compiled.build(jax.tree.map(np.asarray, inputs))
        self._read_variables()

    def publish(self, params: Any, rest: Any) -> None:
        """Assigns the arrays to the script's variables."""
        self.params, self.rest = params, rest
        for variables, values in ((self._trainable, params), (self._others, rest)):
            for name, variable in variables.items():
                variable._direct_assign(values[name])
        self._published = self.list_arrays()

    def read_changes(self) -> bool:
        """Reads all variables again if the script has assigned an array to one; returns whether it has."""
        if all(one is other for one, other in zip(self.list_arrays(), self._published, strict=True)):
            return False
        self._read_variables()
        return True

    def list_arrays(self) -> list[Any]:
        """Returns the arrays in the script's variables."""
        return [variable.value for variable in (*self._trainable.values(), *self._others.values())]

    def read_trace_key(self) -> Any:
        """Returns what a traced function contains as constants; raises ModelError if other layers are trainable now."""
        self._compiled.refresh()
        if self.params is not None and list(self._compiled.trainable) != list(self._trainable):
            (changed, *_) = sorted(self._compiled.trainable.keys() ^ self._trainable.keys())
            raise ModelError(
                f"The variable {changed!r} was frozen or unfrozen after lockstep.wrap, but on JAX the trainer still "
                "trains the variables that were trainable then. Call lockstep.wrap(model) again after you change "
                "`trainable`."
            )
        constants = keras_optimizer_state.read_constants(self._compiled.model.optimizer)
        return (*constants.items(), *self._compiled.trace_key)

    def read_attributes(self) -> Any:
        """Returns None, because other processes need no attributes of a Keras model."""

    def write_attributes(self, attributes: Any) -> None:
        """Does nothing, because `read_attributes` returns None."""


class BoundKerasModel:
    """The model inside a traced function; each call reads the running statistics that earlier calls have computed."""

    def __init__(self, compiled: CompiledModel, params: Any, rest: Any, key: Any, training: bool) -> None:
        self._compiled, self._params, self._rest, self._training = compiled, params, rest, training
        keys = [jax.random.key_data(jax.random.fold_in(key, index)) for index, _ in enumerate(compiled.generators)]
        self._seeds = [each.astype(state.dtype) for each, state in zip(keys, compiled.generators, strict=True)]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Computes the outputs; Keras takes several inputs as one tuple or dict."""
        given = named or (inputs if len(inputs) > 1 else inputs[0])
        outputs, statistics = self._compiled.call_with(self._list_values(), given, self._training)
        self._update_statistics(statistics)
        return outputs

    def compute(self, batch: Any) -> ShardResult:
        """Computes the compiled loss and metrics of a shard."""
        result = self._compiled.compute(self._list_values(), batch, self._training)
        self._update_statistics(result.statistics)
        return result

    def read_rest(self) -> Any:
        """Returns the untrained variables, such as running statistics, after all calls so far."""
        return self._rest

    def _list_values(self) -> VariableValues:
        """Returns the values with which the next call computes."""
        trainable = [self._params[name] for name in self._compiled.trainable]
        statistics = [self._rest[name] for name in self._compiled.statistics]
        return VariableValues(trainable, statistics, self._seeds, [self._rest[name] for name in self._compiled.frozen])

    def _update_statistics(self, statistics: Sequence[Any]) -> None:
        self._rest = {**self._rest, **dict(zip(self._compiled.statistics, statistics, strict=True))}
