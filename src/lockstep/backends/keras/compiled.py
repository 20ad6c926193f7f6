"""Compiled: a Keras model with its optimizer, losses and metrics, as a pure function of its variables.

It is written with Keras alone and runs on each of Keras's backends. The variables of a
shard live in a stateless scope: nothing it does is seen by the next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
from keras import ops

from lockstep.backends.keras import losses, rng, variable_names
from lockstep.backends.keras.metrics import Measures, room
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

PROBE = 2  # examples from which Keras builds losses and metrics


class Values(NamedTuple):
    """What stands in for the model's variables: trained ones, running statistics, seeds of the generators.

    Frozen weights are read where they are, unless they are handed in as well.
    """

    trained: Sequence[Any]
    kept: Sequence[Any]
    seeds: Sequence[Any]
    others: Sequence[Any] = ()


class Outcome(NamedTuple):
    """What a shard gives."""

    value: Any  # the loss, with regularization and the losses that layers added, which are means over the examples
    extra: Any  # these
    counted: Counted | None  # by what the loss has divided, where that is not the number of its values
    labels: Labels | None  # what the targets may be, if they are labels
    kept: Sequence[Any]  # the running statistics afterwards
    sums: Sequence[Any]  # of the metrics


class _Roles(NamedTuple):
    """What each variable of a model is to training, under names that do not depend on it."""

    trained: dict[str, Any]
    kept: dict[str, Any]
    others: dict[str, Any]
    weights: dict[str, Any]
    generators: list[Any]


def _roles(model: Any) -> _Roles:
    layers = model._flatten_layers(include_self=True, recursive=True)
    of_metrics = set(map(id, model.metrics_variables))
    generators = [each for each in model.non_trainable_variables if each.name == "seed_generator_state"]
    trained = set(map(id, model.trainable_variables))
    kept = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
    kept -= trained | of_metrics | set(map(id, generators))
    apart = kept | of_metrics | set(map(id, generators))
    named = variable_names.of(model, model.variables)
    weights = {name: variable for name, variable in named.items() if id(variable) not in apart}
    return _Roles(
        {name: variable for name, variable in weights.items() if id(variable) in trained},
        {name: variable for name, variable in named.items() if id(variable) in kept},
        {name: variable for name, variable in weights.items() if id(variable) not in trained},
        weights,
        generators,
    )


def _made_of(model: Any) -> list[Any]:
    """The model's variables, and its layers where each stands: under the names and in the lists of those around it."""
    found = list(model.variables)
    layers = model._flatten_layers(include_self=True, recursive=True)
    for value in (value for layer in layers if layer._layers for value in vars(layer).values()):
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found += [each for each in held if isinstance(each, keras.Layer)]
    return found


class Compiled:
    """A Keras model as it was compiled."""

    def __init__(self, model: Any, loss: Any) -> None:
        self.model = model
        self.objective = loss if isinstance(loss, Objective) else None
        self.measures = Measures(model)
        self.room = room(model)
        self._compiled_as = compiled_as(model)
        self._generator = rng.stand_in()
        self._known: _Roles | None = None
        self.form: tuple[bool, ...] = ()  # what the model looked like at the last look
        self._parts: Sequence[Any] = ()  # and what it was made of

    # -- variables

    def trained(self) -> dict[str, Any]:
        """The variables that the next update may change, by name."""
        return self._roles.trained

    def kept(self) -> dict[str, Any]:
        """The running statistics, by name."""
        return self._roles.kept

    def others(self) -> dict[str, Any]:
        """Frozen weights, by name."""
        return self._roles.others

    def weights(self) -> dict[str, Any]:
        """Those that are trained and those that are frozen, in an order that does not depend on which they are."""
        return self._roles.weights

    def generators(self) -> list[Any]:
        """The states of the seed generators: the layers' own, and the one for draws without any."""
        return self._roles.generators + ([] if self._generator is None else [self._generator.state])

    @property
    def _roles(self) -> "_Roles":
        if self._known is None:
            self.look()
            assert self._known is not None
        return self._known

    def trainable(self) -> list[bool]:
        """Whether each layer and each variable is to be trained: a layer may compute otherwise where it is not."""
        return [each.trainable for each in self._thawable()]

    def set_trainable(self, flags: Sequence[bool]) -> None:
        """Freezes and thaws as another process has: each by itself, for two layers may hold a third between them."""
        for each, flag in zip(self._thawable(), flags, strict=True):
            if isinstance(each, keras.Layer):
                each._trainable = flag  # less Keras's own way, which passes it on to the layers within
            elif each.trainable != flag:
                each.trainable = flag

    def _thawable(self) -> list[Any]:
        layers = self.model._flatten_layers(include_self=True, recursive=True)
        return [*layers, *(variable for layer in layers for variable in layer._trainable_variables)]

    def look(self) -> None:
        """Works out anew what each variable is to training, where a layer was frozen, thawed or built."""
        check_compiled_once(self._compiled_as, compiled_as(self.model))
        form, made_of = (self.model.built, *self.trainable()), _made_of(self.model)
        if self._known is not None and self.form[0]:  # it was built
            check_same_parts(self._parts, made_of)
        if self._known is None or form != self.form:
            self._known, self.form, self._parts = _roles(self.model), form, made_of

    # -- one shard

    @property
    def waits(self) -> bool:
        """Whether the model's variables, or the optimizer's, are still to be made."""
        return not (self.model.built and self.model.optimizer.built)

    def build(self, inputs: Any) -> None:
        """Makes the variables of a model that waits for its first examples, and looks at what they are."""
        if not self.model.built:
            self.model(select(inputs, slice(0, PROBE)))
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self.look()

    def prepare(self, batch: Any) -> None:
        """Lets Keras build losses and metrics from a few examples."""
        if self.objective is None and not self.measures.checked:
            few, targets, weights = parts(select(batch, slice(0, PROBE)))
            with keras.StatelessScope(collect_losses=True):
                outputs = self._call(few, training=False)
                check_targets(self.model, targets)
                self.model._clear_losses()
            self.measures.build(*(_tensors(each) for each in (targets, outputs, weights)))

    def run(self, values: Values, batch: Any, training: bool) -> Outcome:
        """The loss, the metrics and the running statistics of one shard."""
        x, y, weights = parts(batch)
        with self.scope(values, self.measures.variables) as scope:
            outputs = self._call(x, training)
            check_targets(self.model, y)
            if training:  # some layers add losses only then
                check_loss(self.model)
            labels = losses.find_labels(self.model, outputs)
            if labels is not None and keras.config.backend() == "torch":  # the only one that does not trace
                given = [ops.convert_to_numpy(each) for each in keras.tree.flatten(weights) if each is not None]
                for each in keras.tree.flatten(y):
                    check_labels(ops.convert_to_numpy(each), *labels, *given[:1])
            value = self.model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=training)
            extra = sum((ops.sum(each) for each in self.model.losses), start=0.0)
            self.model._clear_losses()
            self.measures.update(y, outputs, weights)
            counted = losses.counted(self.model, y, outputs, weights)
        sums = [scope.get_current_value(variable) for variable in self.measures.variables]
        return Outcome(value, extra, counted, labels, self.after(scope), sums)

    @property
    def criterion(self) -> Callable[[Any, Any], Any] | None:
        """The loss as a function of (outputs, targets), if it does not say itself how the examples count."""
        return None if self.objective is not None else losses.criterion(self.model)

    def outputs(self, values: Values, x: Any, training: bool = False) -> Any:
        """The outputs of one shard."""
        return self.called(values, x, training)[0]

    def called(self, values: Values, x: Any, training: bool) -> tuple[Any, list[Any]]:
        """The outputs of one shard, and the running statistics afterwards."""
        with self.scope(values) as scope:
            outputs = self._call(x, training)
            self.model._clear_losses()
        return outputs, self.after(scope)

    @contextmanager
    def scope(self, values: Values, zeros: Sequence[Any] = ()) -> Iterator[Any]:
        """A scope in which these values stand in for the variables."""
        mapping = [
            *zip(self.trained().values(), values.trained, strict=True),
            *zip(self.kept().values(), values.kept, strict=True),
            *zip(self.generators(), values.seeds, strict=True),
            *zip(self.others().values(), values.others, strict=bool(values.others)),
            *((variable, ops.zeros(variable.shape, variable.dtype)) for variable in zeros),
        ]
        with (
            rng.drawing_from(self._generator),
            keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
        ):
            yield scope

    def after(self, scope: Any) -> list[Any]:
        """The running statistics at the end of a scope."""
        return [scope.get_current_value(variable) for variable in self.kept().values()]

    def _call(self, x: Any, training: bool) -> Any:
        check_inputs(self.model, x)
        return self.model(x, training=training) if self.model._call_has_training_arg else self.model(x)


def compiled_as(model: Any) -> tuple[Any, ...]:
    """What `compile` has put into the model."""
    return model.optimizer, model._compile_loss, model._compile_metrics


def parts(batch: Any) -> tuple[Any, Any, Any]:
    """The inputs, targets and example weights (or None) of a batch."""
    if isinstance(batch, tuple) and len(batch) in (2, 3):
        return batch[0], batch[1], batch[2] if len(batch) == 3 else None
    if not isinstance(batch, tuple):
        return batch, None, None
    raise BatchError(
        f"A batch is (inputs, targets) or (inputs, targets, weights). Got {describe(batch)}. "
        f"Give one of these, or write an objective:\n{OBJECTIVE_EXAMPLE}"
    )


def _tensors(nest: Any) -> Any:
    return keras.tree.map_structure(lambda each: None if each is None else ops.convert_to_tensor(each), nest)
