"""Pickling: a recipe in one piece, with the optimizer as its making and its numbers.

A Keras optimizer does not survive a pickle with slots in it. So its configuration
travels, and its variables are made anew from those of the model that comes along.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from lockstep.backends import pickling
from lockstep.backends.base import Recipe
from lockstep.errors import ModelError


def dump(recipe: Recipe, trained: Callable[[Any], Sequence[Any]]) -> bytes:
    """One pickle of the recipe; `trained` gives the variables of a model that the optimizer was built with."""
    optimizer = recipe.optimizer
    values = [variable.numpy() for variable in optimizer.variables]
    packed = Packed(replace(recipe, optimizer=None), type(optimizer), optimizer.get_config(), values, trained)
    try:
        return pickling.dump(packed, {tf.keras.losses.Loss: pickling.by_attributes})  # its own pickle forgets its dtype
    except Exception as error:
        raise ModelError(
            f"Another process gets the model by pickle, and this one cannot be pickled: {error}. "
            "Leave out what cannot travel."
        ) from error


class Packed:
    """A recipe on its way; unpickled, it is the recipe."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        """How to make the recipe of its parts."""
        return _unpacked, self._parts


def _unpacked(recipe: Recipe, kind: Any, config: Any, values: Sequence[Any], trained: Any) -> Recipe:
    optimizer = kind.from_config(config)
    optimizer.build(trained(recipe.model))
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)
    return replace(recipe, optimizer=optimizer)
