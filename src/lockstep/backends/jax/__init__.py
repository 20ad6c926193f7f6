"""JAX: one process drives all of its devices, with flax models or plain functions and optax."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.jax import devices as chips
from lockstep.backends.jax import models, nnx_model
from lockstep.backends.jax.backend import JaxBackend
from lockstep.backends.jax.builtin_losses import CrossEntropy, SquaredError
from lockstep.backends.jax.functional_model import Applied, Handle

__all__ = ["CrossEntropy", "JaxBackend", "SquaredError"]

joins = True


def available() -> list[str]:
    """The GPUs or TPUs of this process."""
    return chips.accelerators()


def name(device: Any) -> str:
    """As for `available`."""
    return chips.name(device)


def initial_seed() -> int:
    """0: JAX has no seed of its own, a script makes its keys itself."""
    return 0


def variables(devices: Sequence[str]) -> dict[str, str]:
    """XLA's pool of CPU threads, which by itself would follow from the number of devices."""
    return {"NPROC": str(chips.threads())} if devices[0].startswith("cpu") else {}


def adopt(recipe: Recipe) -> Recipe:
    """The recipe with a model that the script can call: a function of variables gets a handle."""
    if isinstance(recipe.model, models.MODULE):
        return recipe
    if isinstance(recipe.model, Handle):
        taken = recipe.model.optimizer is not None  # by another trainer, which goes on with it
        return replace(recipe, model=recipe.model.again()) if taken else recipe
    model = models.of(recipe.model)
    assert isinstance(model, Applied)
    return replace(recipe, model=model.handle)


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """A backend with a replica on each device."""
    if isinstance(recipe.model, models.MODULE) and isinstance(recipe.optimizer, models.OPTIMIZER):
        nnx_model.check_optimizer(recipe.model, recipe.optimizer)
    return JaxBackend(adopt(recipe), devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """One process drives them all."""
    return [list(devices)]
