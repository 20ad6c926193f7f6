"""Pickles a recipe for a worker: a compiled model as its configuration and the values of its variables.

Keras's own pickle uses a file format that loses a loss's dtype and only finds registered classes. Here layers are
pickled as configurations, together with the script's functions and classes in them. If any layer has no configuration,
the whole model is pickled by its attributes. Losses, metrics and learning-rate schedules are pickled as objects.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
from keras.src.utils import tracking

from lockstep.backends import pickling
from lockstep.backends.base import Recipe
from lockstep.backends.keras import attribute_pickling, custom_objects
from lockstep.errors import ModelError

_REDUCTIONS: dict[type, pickling.Reduction] = {
    keras.losses.Loss: pickling.by_attributes,
    keras.metrics.Metric: pickling.by_attributes,
    tracking.TrackedList: lambda value: (list, (list(value),)),  # a new TrackedList would need its tracker
    tracking.TrackedDict: lambda value: (dict, (dict(value),)),
    tracking.TrackedSet: lambda value: (set, (list(value),)),
}


def dump(recipe: Recipe) -> bytes:
    """Returns a pickle of the recipe for a worker; raises ModelError if the model cannot be pickled."""
    unconfigured = [layer for layer in _list_layers(recipe.model) if not attribute_pickling.has_configuration(layer)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not unconfigured:
                return pickling.dump(PickledRecipe(recipe), _REDUCTIONS)
            attributes = attribute_pickling.ModelAttributes()
            data = pickling.dump(PickledRecipe(recipe, attributes), attributes.list_reductions())
            attributes.check_complete()
            return data
    except Exception as error:
        names = ", ".join(dict.fromkeys(type(layer).__name__ for layer in unconfigured))
        how = f"by its attributes, because {names} has no get_config" if unconfigured else "by its configuration"
        raise ModelError(
            f"The model {recipe.model.name!r} cannot be sent to a worker process: it is pickled {how}, and this "
            f"fails: {error}. Give {names or 'its classes'} a get_config, or use devices=1."
        ) from error


class PickledRecipe:
    """Pickles a recipe; unpickling gives the recipe itself."""

    def __init__(self, recipe: Recipe, attributes: attribute_pickling.ModelAttributes | None = None) -> None:
        self._recipe = recipe
        self._attributes = attributes  # if the model has no configuration

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the function that creates the recipe, and its arguments."""
        model, optimizer = self._recipe.model, self._recipe.optimizer
        with custom_objects.collect_objects() as custom:
            config = None if self._attributes else keras.saving.serialize_keras_object(model.get_config())
            settings = _read_settings(optimizer)
        variables = model.variables
        model_parts = _ModelParts(
            model if self._attributes else type(model),
            config,
            None if self._attributes else model.get_build_config(),
            [layer.name for layer in _list_layers(model)],
            [variable.path for variable in variables],
            _read_values(variables),
        )
        indices = {id(variable): index for index, variable in enumerate(variables)}
        built = [indices[id(variable)] for variable in optimizer._trainable_variables]
        optimizer_parts = _OptimizerParts(
            type(optimizer), settings, built, _read_values(optimizer.variables), _read_no_decay(optimizer, variables)
        )
        loss, metrics = model._compile_loss, model._compile_metrics
        compile_args = {
            "loss": getattr(loss, "_user_loss", None),
            "loss_weights": getattr(loss, "_user_loss_weights", None),
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }
        recipe = replace(self._recipe, model=None, optimizer=None)
        parts = _read_defaults(), recipe, custom, model_parts, optimizer_parts, compile_args, self._attributes
        return _create_recipe, parts


class _Defaults(NamedTuple):
    """Keras's defaults for the whole process."""

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: Any  # as a configuration


class _ModelParts(NamedTuple):
    """A model in parts. Keras would create other names in another process, so the names are sent, too."""

    model: Any  # the model's class; the model itself if it has no configuration
    config: Any
    build_config: Any
    names: Sequence[str]  # of layers
    paths: Sequence[str]  # of variables
    values: Sequence[Any]


class _NoDecay(NamedTuple):
    """The variables without weight decay, which a configuration does not contain."""

    indices: Sequence[int]
    names: Sequence[str]


class _OptimizerParts(NamedTuple):
    """An optimizer in parts: its class, its configuration, and the values of its variables."""

    kind: Any
    settings: dict[str, Any]
    built: Sequence[int]  # indices of the model's variables for which it was built; some may be frozen now
    values: Sequence[Any]
    no_decay: _NoDecay


def _create_recipe(
    defaults: _Defaults,
    recipe: Recipe,
    custom: custom_objects.CustomObjects,
    model_parts: _ModelParts,
    optimizer_parts: _OptimizerParts,
    compile_args: Any,
    attributes: Any,
) -> Recipe:
    """Creates the recipe in a worker, with a model that has the script's names and values."""
    _write_defaults(defaults)  # first, because layers read them when they are created
    if attributes is not None:
        attribute_pickling.restore_attributes(attributes)
    kind_or_model, config, build_config, *_ = model_parts
    with custom_objects.use_objects(custom):
        model = kind_or_model if config is None else kind_or_model.from_config(config)
        if build_config and not model.built:
            model.build_from_config(build_config)
            model.built = True
        optimizer = optimizer_parts.kind.from_config(optimizer_parts.settings)
    for layer, name in zip(_list_layers(model), model_parts.names, strict=True):
        layer.name = name
    variables = model.variables
    for variable, path in zip(variables, model_parts.paths, strict=True):
        variable._path = path
    _write_values(variables, model_parts.values)
    no_decay = optimizer_parts.no_decay
    # Before `build`, after which Keras refuses to change them.
    optimizer.exclude_from_weight_decay([variables[index] for index in no_decay.indices], no_decay.names)
    optimizer.build([variables[index] for index in optimizer_parts.built])
    _write_values(optimizer.variables, optimizer_parts.values)
    # Without scaling: if `compile` has wrapped the optimizer in a LossScaleOptimizer, the wrapper was pickled.
    model.compile(optimizer, **compile_args, auto_scale_loss=False)
    return replace(recipe, model=model, optimizer=model.optimizer)


def _read_defaults() -> _Defaults:
    config = keras.config
    policy = keras.dtype_policies.serialize(config.dtype_policy())
    return _Defaults(config.floatx(), config.epsilon(), config.image_data_format(), policy)


def _write_defaults(defaults: _Defaults) -> None:
    keras.config.set_floatx(defaults.floatx)
    keras.config.set_epsilon(defaults.epsilon)
    keras.config.set_image_data_format(defaults.image_data_format)
    keras.config.set_dtype_policy(keras.dtype_policies.get(defaults.dtype_policy))


def _read_settings(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizer's configuration; a schedule stays an object, because a script's may have no get_config."""
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return dict(optimizer.get_config())
    # The configuration of a copy with a number in place of the schedule, whose own get_config is then not called.
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer), _learning_rate=0.0)
    return {**copy.get_config(), "learning_rate": schedule}


def _read_no_decay(optimizer: Any, variables: Sequence[Any]) -> _NoDecay:
    """Returns what the script has given the optimizer's `exclude_from_weight_decay`."""
    keys = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    indices = [index for index, variable in enumerate(variables) if optimizer._var_key(variable) in keys]
    return _NoDecay(indices, [] if pattern is None else [pattern.pattern])


def _list_layers(model: Any) -> list[Any]:
    return list(model._flatten_layers(include_self=True, recursive=True))


def _read_values(variables: Sequence[Any]) -> list[Any]:
    return [variable.numpy() for variable in variables]


def _write_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
