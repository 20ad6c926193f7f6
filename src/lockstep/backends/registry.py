"""Choosing: which backend a model belongs to, without importing any framework.

A model in hand means that its framework is imported already. So it is enough to
look at where the model's classes were defined.
"""

import importlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from lockstep.backends.array_ops import ArrayOps
from lockstep.backends.base import Module
from lockstep.core import framework_hooks
from lockstep.errors import ModelError

_HOMES = {
    "keras": "lockstep.backends.keras",
    "tensorflow": "lockstep.backends.tensorflow",
    "torch": "lockstep.backends.torch",
    "flax": "lockstep.backends.jax",
    "jax": "lockstep.backends.jax",
    "jaxlib": "lockstep.backends.jax",
    "lockstep.backends.jax": "lockstep.backends.jax",
    "mxnet": "lockstep.backends.mxnet",
    "lockstep.backends.numpy": "lockstep.backends.numpy",
}

_ARRAYS = {
    "numpy": "lockstep.backends.numpy",
    "torch": "lockstep.backends.torch",
    "jax": "lockstep.backends.jax",
    "jaxlib": "lockstep.backends.jax",
    "tensorflow": "lockstep.backends.tensorflow",
    "mxnet": "lockstep.backends.mxnet",
}


framework_hooks.register("torch", "lockstep.backends.torch_hooks")


def name_of(model: Any) -> str:
    """The name of the backend's module for this model.

    >>> from lockstep.backends.numpy import Dense
    >>> name_of(Dense([4, 3], seed=0))
    'lockstep.backends.numpy'
    """
    telling = _telling(model)
    if telling is not model and isinstance(telling, np.ndarray):  # (apply, variables) before JAX has held them
        return _HOMES["jax"]
    name = _found(telling, _HOMES)
    if name is not None:
        return name
    raise ModelError(
        "A model is a torch.nn.Module, a Keras model, a flax module, a TrainState, a gluon.Block or "
        "(function, variables). "
        f"Got {type(model).__module__}.{type(model).__name__}. Give lockstep.wrap the model itself."
    )


def home_of(array: Any) -> str | None:
    """The name of the backend's module for this array; None for what is no array.

    >>> import numpy
    >>> home_of(numpy.ones(2)), home_of("text")
    ('lockstep.backends.numpy', None)
    """
    return _found(array, _ARRAYS) if hasattr(array, "shape") else None


def _found(value: Any, homes: Mapping[str, str]) -> str | None:
    for kind in type(value).__mro__:
        for home, name in homes.items():
            if kind.__module__ == home or kind.__module__.startswith(home + "."):
                return name
    return None


def _telling(model: Any) -> Any:
    """What tells the framework: the model itself, or of (apply, variables) the module or the first variable."""
    if not (isinstance(model, tuple) and len(model) == 2 and callable(model[0])):
        return model
    owner = getattr(model[0], "__self__", model[0])
    if type(owner).__module__.partition(".")[0] in _HOMES or hasattr(owner, "apply"):
        return owner
    variables = model[1]
    while isinstance(variables, Mapping | list | tuple) and variables:
        variables = next(iter(variables.values() if isinstance(variables, Mapping) else variables))
    return variables


def module(name: str) -> Module:
    """The backend's module, imported now."""
    return cast(Module, importlib.import_module(name))


def arrays(name: str) -> ArrayOps:
    """What the backend does to its framework's arrays, imported now."""
    return cast(ArrayOps, importlib.import_module(f"{name}.array_ops"))
