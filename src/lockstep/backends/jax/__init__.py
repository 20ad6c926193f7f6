"""JAX: one process drives all of its devices; models from flax or as plain functions, optimizers from optax."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.backends.base import Backend, Recipe
from lockstep.backends.jax import devices as jax_devices
from lockstep.backends.jax import models, nnx_model
from lockstep.backends.jax.backend import JaxBackend
from lockstep.backends.jax.builtin_losses import CrossEntropy, SquaredError
from lockstep.backends.jax.functional_model import FunctionalModel, ModelHandle

__all__ = ["CrossEntropy", "JaxBackend", "SquaredError"]

joins = True
compiles = False


def available() -> list[str]:
    """Returns the names of this process's GPUs or TPUs."""
    return jax_devices.list_accelerators()


def name(device: Any) -> str:
    """Returns a JAX device's name as `available` writes it, e.g. `cuda:0`."""
    return jax_devices.name_device(device)


def initial_seed() -> int:
    """Returns 0, because JAX has no global seed: a script creates its keys itself."""
    return 0


def variables(devices: Sequence[str]) -> dict[str, str]:
    """Returns NPROC on CPUs: without it the size of XLA's thread pool would depend on the number of devices."""
    return {"NPROC": str(jax_devices.choose_pool_size())} if devices[0].startswith("cpu") else {}


def adopt(recipe: Recipe) -> Recipe:
    """Returns the recipe with a model that the script can call: for a function of variables, a `ModelHandle`."""
    if isinstance(recipe.model, models.NNX_MODULE):
        return recipe
    if isinstance(recipe.model, ModelHandle):
        # A handle of another trainer is updated by that trainer, so this trainer gets a copy.
        is_in_use = recipe.model.optimizer is not None
        return replace(recipe, model=recipe.model.copy_model()) if is_in_use else recipe
    model = models.adapt_model(recipe.model)
    assert isinstance(model, FunctionalModel)
    return replace(recipe, model=model.handle)


def open(recipe: Recipe, devices: Sequence[str]) -> Backend:
    """Returns a backend with a replica on each device."""
    if isinstance(recipe.model, models.NNX_MODULE) and isinstance(recipe.optimizer, models.NNX_OPTIMIZER):
        nnx_model.check_optimizer(recipe.model, recipe.optimizer)
    return JaxBackend(adopt(recipe), devices)


def processes(devices: Sequence[str]) -> list[list[str]]:
    """Returns one list with every device, because one process drives them all."""
    return [list(devices)]
