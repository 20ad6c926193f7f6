"""Keras on JAX: a compiled model and its optimizer as a model and an optimizer for the JAX backend.

JAX's arrays are immutable; a write to a Keras variable replaces its array. So the JAX backend treats a Keras model like
an nnx module: it computes with its own arrays, assigns them to the script's variables after each step, and reads the
arrays that the script has assigned.
"""

from collections.abc import Sequence

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.keras import unsupported
from lockstep.backends.keras.on_jax.backend import KerasOnJax


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Returns the backend that trains a Keras model on JAX."""
    unsupported.check_loss_scale(recipe.optimizer)
    unsupported.check_precision(recipe)
    return KerasOnJax(recipe, devices)
