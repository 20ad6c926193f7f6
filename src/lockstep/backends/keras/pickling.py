"""Pickling: a compiled model in one piece, as its configuration and its numbers.

Keras's own pickle goes through a file format that forgets a loss's dtype and knows no
lambda. Here layers travel as configurations, with those classes that are not Keras's
own; losses and metrics travel as the objects they are.
"""

import copyreg
import io
import warnings
from dataclasses import replace
from typing import Any

import cloudpickle
import keras

from lockstep.backends.base import Recipe
from lockstep.errors import ModelError


def dump(recipe: Recipe) -> bytes:
    """One pickle of the recipe."""
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _Pickler(buffer).dump(Packed(recipe))
    except Exception as error:
        raise ModelError(
            f"A worker process gets the model by its configuration. {recipe.model.name!r} cannot travel: {error}. "
            "Give its classes a get_config, or use devices=1."
        ) from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # without stubs it is Any
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, keras.losses.Loss):
            return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]  # pickle's own
        return super().reducer_override(value)


class Packed:
    """A recipe on its way; unpickled, it is the recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __reduce__(self) -> tuple[Any, ...]:
        """How to make the recipe of its parts."""
        model, optimizer = self._recipe.model, self._recipe.optimizer
        config = keras.saving.serialize_keras_object(model) | {"compile_config": None}
        kinds = {type(layer) for layer in model._flatten_layers(include_self=True, recursive=True)}
        custom = {kind.__name__: kind for kind in kinds if not kind.__module__.startswith("keras.")}
        loss, metrics = model._compile_loss, model._compile_metrics
        compiled = {
            "loss": getattr(loss, "_user_loss", None),
            "loss_weights": getattr(loss, "_user_loss_weights", None),
            "metrics": getattr(metrics, "_user_metrics", None),
            "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        }
        return _unpacked, (
            replace(self._recipe, model=None, optimizer=None),
            (config, custom, [variable.numpy() for variable in model.variables]),
            (type(optimizer), optimizer.get_config(), [variable.numpy() for variable in optimizer.variables]),
            compiled,
        )


def _unpacked(recipe: Recipe, layers: Any, stepping: Any, compiled: Any) -> Recipe:
    config, custom, values = layers
    model = keras.saving.deserialize_keras_object(config, custom_objects=custom, safe_mode=False)
    _fill(model.variables, values)
    kind, settings, slots = stepping
    optimizer = kind.from_config(settings)
    optimizer.build(model.trainable_variables)
    _fill(optimizer.variables, slots)
    model.compile(optimizer, **compiled)
    return replace(recipe, model=model, optimizer=model.optimizer)


def _fill(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
