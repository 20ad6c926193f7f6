"""Pickling: a compiled model in one piece, as its configuration and its numbers.

Keras's own pickle goes through a file format that forgets a loss's dtype and finds nothing
that is not registered. Here layers travel as configurations, with what is the script's own in
them, or by their attributes where one has no configuration; losses, metrics and learning-rate
schedules travel as the objects they are.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
from keras.src.utils import tracking

from lockstep.backends import pickling
from lockstep.backends.base import Recipe
from lockstep.backends.keras import custom_objects, values
from lockstep.errors import ModelError

_REDUCTIONS: dict[type, pickling.Reduction] = {
    keras.losses.Loss: pickling.by_attributes,
    keras.metrics.Metric: pickling.by_attributes,
    tracking.TrackedList: lambda value: (list, (list(value),)),  # they tell a tracker, which is not there yet
    tracking.TrackedDict: lambda value: (dict, (dict(value),)),
    tracking.TrackedSet: lambda value: (set, (list(value),)),
}


def dump(recipe: Recipe) -> bytes:
    """One pickle of the recipe."""
    without = [layer for layer in _layers(recipe.model) if not values.has_configuration(layer)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not without:
                return pickling.dump(Packed(recipe), _REDUCTIONS)
            parts = values.Values()
            data = pickling.dump(Packed(recipe, parts), parts.reductions())
            parts.check_complete()
            return data
    except Exception as error:
        names = ", ".join(dict.fromkeys(type(layer).__name__ for layer in without))
        rule = f"or by its attributes, for {names} has no get_config" if without else "which Keras makes of it"
        raise ModelError(
            f"A worker process gets the model by its configuration, {rule}. {recipe.model.name!r} cannot travel: "
            f"{error}. Give {names or 'its classes'} a get_config, or use devices=1."
        ) from error


class Packed:
    """A recipe on its way; unpickled, it is the recipe."""

    def __init__(self, recipe: Recipe, parts: values.Values | None = None) -> None:
        self._recipe = recipe
        self._parts = parts  # where the model has no configuration

    def __reduce__(self) -> tuple[Any, ...]:
        """How to make the recipe of its parts."""
        model, optimizer = self._recipe.model, self._recipe.optimizer
        with custom_objects.collected() as carried:
            config = None if self._parts else keras.saving.serialize_keras_object(model.get_config())
            settings = _settings(optimizer)
        variables = model.variables
        made = _Made(
            model if self._parts else type(model),
            config,
            None if self._parts else model.get_build_config(),
            [layer.name for layer in _layers(model)],
            [variable.path for variable in variables],
            _values(variables),
        )
        places = {id(variable): place for place, variable in enumerate(variables)}
        built = [places[id(variable)] for variable in optimizer._trainable_variables]
        stepping = _Stepping(
            type(optimizer), settings, built, _values(optimizer.variables), _spared(optimizer, variables)
        )
        loss, metrics = model._compile_loss, model._compile_metrics
        compiled = {
            "loss": getattr(loss, "_user_loss", None),
            "loss_weights": getattr(loss, "_user_loss_weights", None),
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }
        recipe = replace(self._recipe, model=None, optimizer=None)
        return _unpacked, (_defaults(), recipe, carried, made, stepping, compiled, self._parts)


class _Defaults(NamedTuple):
    """What Keras takes, in the whole process, where nothing else is said."""

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: Any  # its configuration


class _Made(NamedTuple):
    """How a model is made, and what its layers and variables are called: that follows from where Keras makes them."""

    kind: Any  # a class; or, where there is no configuration, the model itself
    config: Any
    building: Any
    names: Sequence[str]
    paths: Sequence[str]
    values: Sequence[Any]


class _Stepping(NamedTuple):
    """How an optimizer is made, and for which of the model's variables; some may be frozen since."""

    kind: Any
    settings: dict[str, Any]
    built: Sequence[int]
    values: Sequence[Any]
    spared: "_Spared"


class _Spared(NamedTuple):
    """What weight decay leaves alone, of which a configuration says nothing: places of variables, and names."""

    places: Sequence[int]
    names: Sequence[str]


def _unpacked(
    defaults: _Defaults,
    recipe: Recipe,
    carried: custom_objects.Customs,
    made: _Made,
    stepping: _Stepping,
    compiled: Any,
    parts: Any,
) -> Recipe:
    _set(defaults)
    if parts is not None:
        values.restore(parts)
    with custom_objects.known(carried):
        model = made.kind if made.config is None else made.kind.from_config(made.config)
        if made.building and not model.built:
            model.build_from_config(made.building)
            model.built = True
        optimizer = stepping.kind.from_config(stepping.settings)
    for layer, name in zip(_layers(model), made.names, strict=True):
        layer.name = name
    variables = model.variables
    for variable, path in zip(variables, made.paths, strict=True):
        variable._path = path
    _fill(variables, made.values)
    spared = stepping.spared
    optimizer.exclude_from_weight_decay([variables[place] for place in spared.places], spared.names)
    optimizer.build([variables[place] for place in stepping.built])
    _fill(optimizer.variables, stepping.values)
    model.compile(optimizer, **compiled, auto_scale_loss=False)  # the optimizer is what `compile` made of it already
    return replace(recipe, model=model, optimizer=model.optimizer)


def _defaults() -> _Defaults:
    config = keras.config
    policy = keras.dtype_policies.serialize(config.dtype_policy())
    return _Defaults(config.floatx(), config.epsilon(), config.image_data_format(), policy)


def _set(defaults: _Defaults) -> None:
    keras.config.set_floatx(defaults.floatx)
    keras.config.set_epsilon(defaults.epsilon)
    keras.config.set_image_data_format(defaults.image_data_format)
    keras.config.set_dtype_policy(keras.dtype_policies.get(defaults.dtype_policy))


def _settings(optimizer: Any) -> dict[str, Any]:
    """What the optimizer was made with; a schedule as it is, for those of scripts often have no configuration."""
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return dict(optimizer.get_config())
    plain = object.__new__(type(optimizer))
    vars(plain).update(vars(optimizer), _learning_rate=0.0)
    return {**plain.get_config(), "learning_rate": schedule}


def _spared(optimizer: Any, variables: Sequence[Any]) -> _Spared:
    keys = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    places = [place for place, variable in enumerate(variables) if optimizer._var_key(variable) in keys]
    return _Spared(places, [] if pattern is None else [pattern.pattern])


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers(include_self=True, recursive=True))


def _values(variables: Sequence[Any]) -> list[Any]:
    return [variable.numpy() for variable in variables]


def _fill(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
