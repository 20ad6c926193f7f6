"""A compiled Keras model as a pure function of its variables.

This module uses Keras alone and runs on each of Keras's backends. A shard is computed in a stateless scope, so what it
writes to variables does not reach the next shard.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
from keras import ops

from lockstep.backends.keras import losses, rng, variable_names
from lockstep.backends.keras.metrics import CompiledMetrics, find_room
from lockstep.backends.keras.unsupported import (
    check_compiled_once,
    check_inputs,
    check_loss,
    check_same_parts,
    check_targets,
)
from lockstep.core.batches import OBJECTIVE_EXAMPLE, describe, select
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels, check_labels
from lockstep.core.weighing import Counted
from lockstep.errors import BatchError

NUM_PROBE_EXAMPLES = 2  # the number of examples from which Keras builds variables, losses and metrics


class VariableValues(NamedTuple):
    """The values with which a shard computes, in place of the values in the model's variables."""

    trainable: Sequence[Any]
    statistics: Sequence[Any]
    seeds: Sequence[Any]  # of the random number generators
    frozen: Sequence[Any] = ()  # without them the model reads its own frozen weights


class ShardResult(NamedTuple):
    """What a compiled model computes for one shard."""

    loss: Any  # with the extra loss
    extra_loss: Any  # regularization and the losses that layers added: means over the examples
    counted: Counted | None  # what the loss was divided by, if that is not the number of its values
    labels: Labels | None  # the valid labels, if the targets are labels
    statistics: Sequence[Any]  # the running statistics after this shard
    sums: Sequence[Any]  # the values of the metrics' variables


class _VariableRoles(NamedTuple):
    """A model's variables by what training does with them; freezing a variable does not change its name."""

    trainable: dict[str, Any]
    statistics: dict[str, Any]
    frozen: dict[str, Any]
    weights: dict[str, Any]  # trainable and frozen
    generators: list[Any]  # states of the layers' seed generators


def _find_roles(model: Any) -> _VariableRoles:
    """Returns the variables by role: a layer's own non-trainable variables are its running statistics."""
    layers = model._flatten_layers(include_self=True, recursive=True)
    metrics = set(map(id, model.metrics_variables))
    generators = [each for each in model.non_trainable_variables if each.name == "seed_generator_state"]
    trainable = set(map(id, model.trainable_variables))
    statistics = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
    statistics -= trainable | metrics | set(map(id, generators))
    others = statistics | metrics | set(map(id, generators))
    named = variable_names.name_variables(model, model.variables)
    weights = {name: variable for name, variable in named.items() if id(variable) not in others}
    return _VariableRoles(
        {name: variable for name, variable in weights.items() if id(variable) in trainable},
        {name: variable for name, variable in named.items() if id(variable) in statistics},
        {name: variable for name, variable in weights.items() if id(variable) not in trainable},
        weights,
        generators,
    )


def _list_parts(model: Any) -> list[Any]:
    """Returns the model's variables, and every layer in the order of the attributes, lists and dicts that have it."""
    parts = list(model.variables)
    layers = model._flatten_layers(include_self=True, recursive=True)
    for value in (value for layer in layers if layer._layers for value in vars(layer).values()):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        parts += [each for each in items if isinstance(each, keras.Layer)]
    return parts


class CompiledModel:
    """A Keras model with the optimizer, the losses and the metrics with which it was compiled."""

    def __init__(self, model: Any, loss: Any) -> None:
        self.model = model
        self.objective = loss if isinstance(loss, Objective) else None
        self.metrics = CompiledMetrics(model)
        self.room = find_room(model)
        self._compile_args = _list_compile_args(model)
        self._generator = rng.create_generator()
        self._last_roles: _VariableRoles | None = None  # found by the last `refresh`, as are the next two
        self.trace_key: tuple[bool, ...] = ()  # whether the model is built, and which of its parts are trainable
        self._parts: Sequence[Any] = ()

    # -- variables

    @property
    def trainable(self) -> dict[str, Any]:
        """The variables that the next update may change, by name."""
        return self._roles.trainable

    @property
    def statistics(self) -> dict[str, Any]:
        """The running statistics, by name."""
        return self._roles.statistics

    @property
    def frozen(self) -> dict[str, Any]:
        """The frozen weights, by name."""
        return self._roles.frozen

    @property
    def weights(self) -> dict[str, Any]:
        """The trainable and the frozen weights, in an order that freezing does not change."""
        return self._roles.weights

    @property
    def generators(self) -> list[Any]:
        """The states of the layers' seed generators, and the state of Keras's global seed generator."""
        return self._roles.generators + ([] if self._generator is None else [self._generator.state])

    @property
    def _roles(self) -> _VariableRoles:
        if self._last_roles is None:
            self.refresh()
            assert self._last_roles is not None
        return self._last_roles

    def read_trainable_flags(self) -> list[bool]:
        """Returns whether each layer and each variable is trainable; a frozen layer may compute differently."""
        return [each.trainable for each in self._list_freezable()]

    def write_trainable_flags(self, flags: Sequence[bool]) -> None:
        """Freezes and unfreezes each layer and each variable separately, because two layers may share a third."""
        for each, flag in zip(self._list_freezable(), flags, strict=True):
            if isinstance(each, keras.Layer):
                each._trainable = flag  # the property `trainable` would also set the flag of the layers inside
            elif each.trainable != flag:
                each.trainable = flag

    def _list_freezable(self) -> list[Any]:
        layers = self.model._flatten_layers(include_self=True, recursive=True)
        return [*layers, *(variable for layer in layers for variable in layer._trainable_variables)]

    def refresh(self) -> None:
        """Finds the roles of the variables again, if a layer was frozen, unfrozen or built since the last call."""
        check_compiled_once(self._compile_args, _list_compile_args(self.model))
        key, parts = (self.model.built, *self.read_trainable_flags()), _list_parts(self.model)
        # Building a model adds parts, so only a built one is checked.
        if self._last_roles is not None and self.trace_key[0]:
            check_same_parts(self._parts, parts)
        if self._last_roles is None or key != self.trace_key:
            self._last_roles, self.trace_key, self._parts = _find_roles(self.model), key, parts

    @property
    def waits_for_batch(self) -> bool:
        """Whether the model or its optimizer has no variables yet, because the first batch creates them."""
        return not (self.model.built and self.model.optimizer.built)

    # -- one shard

    def build(self, inputs: Any) -> None:
        """Creates the variables of the model and of its optimizer from inputs, if they do not exist yet."""
        if not self.model.built:
            self.model(select(inputs, slice(0, NUM_PROBE_EXAMPLES)))
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self.refresh()

    def prepare(self, batch: Any) -> None:
        """Lets Keras build losses and metrics from a few examples."""
        if self.objective is None and not self.metrics.are_built:
            inputs, targets, weights = split_batch(select(batch, slice(0, NUM_PROBE_EXAMPLES)))
            with keras.StatelessScope(collect_losses=True):
                outputs = self.call(inputs, training=False)
                check_targets(self.model, targets)
                self.model._clear_losses()
            self.metrics.build(*(_to_tensors(each) for each in (targets, outputs, weights)))

    def compute(self, values: VariableValues, batch: Any, training: bool) -> ShardResult:
        """Computes the loss, the metrics and the running statistics of one shard."""
        x, y, weights = split_batch(batch)
        with self.replace_variables(values, self.metrics.variables) as scope:
            outputs = self.call(x, training)
            check_targets(self.model, y)
            if training:  # some layers add losses in training only
                check_loss(self.model)
            labels = losses.find_labels(self.model, outputs)
            # Only PyTorch computes eagerly. Elsewhere this is a traced function, and the backend checks the labels.
            if labels is not None and keras.config.backend() == "torch":
                given = [ops.convert_to_numpy(each) for each in keras.tree.flatten(weights) if each is not None]
                for each in keras.tree.flatten(y):
                    check_labels(ops.convert_to_numpy(each), *labels, *given[:1])
            loss = self.model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=training)
            extra = sum((ops.sum(each) for each in self.model.losses), start=0.0)
            self.model._clear_losses()
            self.metrics.update(y, outputs, weights)
            counted = losses.find_denominator(self.model, y, outputs, weights)
        sums = [scope.get_current_value(variable) for variable in self.metrics.variables]
        return ShardResult(loss, extra, counted, labels, self.read_statistics(scope), sums)

    @property
    def criterion(self) -> Callable[[Any, Any], Any] | None:
        """The loss as a function of (outputs, targets); None if its reduction is known."""
        return None if self.objective is not None else losses.find_criterion(self.model)

    def call_with(self, values: VariableValues, x: Any, training: bool) -> tuple[Any, list[Any]]:
        """Returns the outputs of one shard, and the running statistics afterwards."""
        with self.replace_variables(values) as scope:
            outputs = self.call(x, training)
            self.model._clear_losses()
        return outputs, self.read_statistics(scope)

    @contextmanager
    def replace_variables(self, values: VariableValues, zeros: Sequence[Any] = ()) -> Iterator[Any]:
        """Opens a scope in which the model computes with these values, and in which the variables in `zeros` are 0."""
        mapping = [
            *zip(self.trainable.values(), values.trainable, strict=True),
            *zip(self.statistics.values(), values.statistics, strict=True),
            *zip(self.generators, values.seeds, strict=True),
            *zip(self.frozen.values(), values.frozen, strict=bool(values.frozen)),  # nothing if none are given
            *((variable, ops.zeros(variable.shape, variable.dtype)) for variable in zeros),
        ]
        with (
            rng.replace_global_generator(self._generator),
            keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
        ):
            yield scope

    def read_statistics(self, scope: Any) -> list[Any]:
        """Returns the running statistics that a scope has computed."""
        return [scope.get_current_value(variable) for variable in self.statistics.values()]

    def call(self, x: Any, training: bool) -> Any:
        """Returns the model's outputs; passes `training` to the model's `call` if that accepts it."""
        check_inputs(self.model, x)
        return self.model(x, training=training) if self.model._call_has_training_arg else self.model(x)


def _list_compile_args(model: Any) -> tuple[Any, ...]:
    """Returns the objects that `compile` has set in the model."""
    return model.optimizer, model._compile_loss, model._compile_metrics


def split_batch(batch: Any) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and example weights of a batch; None for targets or weights that it lacks."""
    if isinstance(batch, tuple) and len(batch) in (2, 3):
        return batch[0], batch[1], batch[2] if len(batch) == 3 else None
    if not isinstance(batch, tuple):
        return batch, None, None
    raise BatchError(
        f"A batch must be (inputs, targets) or (inputs, targets, weights). Got {describe(batch)}. "
        f"Give one of these, or write an objective:\n{OBJECTIVE_EXAMPLE}"
    )


def _to_tensors(tree: Any) -> Any:
    return keras.tree.map_structure(lambda each: None if each is None else ops.convert_to_tensor(each), tree)
