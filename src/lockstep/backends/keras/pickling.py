"""Pickling: a compiled model in one piece, as its configuration and its numbers.

Keras's own pickle goes through a file format that forgets a loss's dtype and finds nothing
that is not registered. Here layers travel as configurations, with what is the script's own in
them; losses, metrics and learning-rate schedules travel as the objects they are.
"""

import warnings
from dataclasses import replace
from typing import Any

import keras

from lockstep.backends import pickling
from lockstep.backends.base import Recipe
from lockstep.backends.keras import customs
from lockstep.errors import ModelError


def dump(recipe: Recipe) -> bytes:
    """One pickle of the recipe."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pickling.dump(Packed(recipe), (keras.losses.Loss, keras.metrics.Metric))
    except Exception as error:
        raise ModelError(
            f"A worker process gets the model by its configuration. {recipe.model.name!r} cannot travel: {error}. "
            "Give its classes a get_config, or use devices=1."
        ) from error


class Packed:
    """A recipe on its way; unpickled, it is the recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __reduce__(self) -> tuple[Any, ...]:
        """How to make the recipe of its parts."""
        model, optimizer = self._recipe.model, self._recipe.optimizer
        with customs.collected() as carried:
            layers = type(model), keras.saving.serialize_keras_object(model.get_config()), model.get_build_config()
            stepping = type(optimizer), _settings(optimizer)
        loss, metrics = model._compile_loss, model._compile_metrics
        compiled = {
            "loss": getattr(loss, "_user_loss", None),
            "loss_weights": getattr(loss, "_user_loss_weights", None),
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }
        values = [[variable.numpy() for variable in each.variables] for each in (model, optimizer)]
        return _unpacked, (
            replace(self._recipe, model=None, optimizer=None),
            carried,
            layers,
            stepping,
            compiled,
            values,
        )


def _settings(optimizer: Any) -> dict[str, Any]:
    """What the optimizer was made with; a schedule as it is, for those of scripts often have no configuration."""
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return dict(optimizer.get_config())
    plain = object.__new__(type(optimizer))
    vars(plain).update(vars(optimizer), _learning_rate=0.0)
    return {**plain.get_config(), "learning_rate": schedule}


def _unpacked(
    recipe: Recipe, carried: customs.Customs, layers: Any, stepping: Any, compiled: Any, values: Any
) -> Recipe:
    with customs.known(carried):
        kind, config, building = layers
        model = kind.from_config(config)
        if building and not model.built:
            model.build_from_config(building)
        kind, settings = stepping
        optimizer = kind.from_config(settings)
    optimizer.build(model.trainable_variables)
    for each, numbers in zip((model, optimizer), values, strict=True):
        for variable, value in zip(each.variables, numbers, strict=True):
            variable.assign(value)
    model.compile(optimizer, **compiled)
    return replace(recipe, model=model, optimizer=model.optimizer)
