"""Keras on JAX: the compiled model and its optimizer as a model and an optimizer of the JAX backend.

JAX's arrays never change, and a Keras variable is a place for one. So the JAX backend
does with a Keras model what it does with an nnx module: it computes with arrays of its own,
puts them into the script's variables after each step, and sees what the script has put there.
"""

from collections.abc import Sequence

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.keras import unsupported
from lockstep.backends.keras.on_jax.backend import KerasOnJax


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """The JAX backend over the model."""
    unsupported.check_scale(recipe.optimizer)
    unsupported.check_precision(recipe)
    return KerasOnJax(recipe, devices)
