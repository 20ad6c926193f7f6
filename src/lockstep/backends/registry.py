"""Chooses the backend of a model or an array, without importing a framework.

The modules in which the model's classes are defined name its framework, which is imported already. Backends of other
packages are entry points of the group `lockstep.backends`: the name is the package whose classes the backend serves,
the value is the backend's module. They are read only if no backend of Lockstep serves the class.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from lockstep.backends.array_ops import ArrayOps
from lockstep.backends.base import Module
from lockstep.core import framework_hooks
from lockstep.errors import ModelError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Home = TypeVar("Home")

GROUP = "lockstep.backends"

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

# What to give instead of an object of a library whose models are functions of their variables.
_INSTEAD = {
    "equinox": "(lambda params, x: jax.vmap(eqx.combine(params, static))(x), params), with params, static = "
    "eqx.partition(model, eqx.is_array)",
    "haiku": "(lambda params, x, *, rngs: transformed.apply(params, rngs['dropout'], x), params), with params = "
    "transformed.init(key, x)",
}

_ARRAYS = {
    "numpy": "lockstep.backends.numpy",
    "torch": "lockstep.backends.torch",
    "jax": "lockstep.backends.jax",
    "jaxlib": "lockstep.backends.jax",
    "tensorflow": "lockstep.backends.tensorflow",
    "mxnet": "lockstep.backends.mxnet",
}


framework_hooks.register("torch", "lockstep.backends.torch_framework_hooks")


def find_backend(model: Any) -> str:
    """Returns the name of the backend's module for this model.

    >>> from lockstep.backends.numpy import Dense
    >>> find_backend(Dense([4, 3], seed=0))
    'lockstep.backends.numpy'
    """
    deciding = _find_deciding_object(model)
    if deciding is not model and isinstance(deciding, np.ndarray):  # (apply, variables) with numpy variables
        return _HOMES["jax"]
    name = _find_home(deciding, _HOMES) or _find_outside(deciding)
    if name is not None:
        return name
    instead = _find_home(model, _INSTEAD) or "the model itself"
    raise ModelError(
        "The model must be a torch.nn.Module, a Keras model, a flax module, a TrainState, a gluon.Block or "
        "(function, variables), or of a framework whose backend is installed. "
        f"Got {type(model).__module__}.{type(model).__name__}. Give lockstep.wrap {instead}."
    )


def find_array_backend(array: Any) -> str | None:
    """Returns the name of the backend's module for this array; None if the value is not an array.

    >>> import numpy
    >>> find_array_backend(numpy.ones(2)), find_array_backend("text")
    ('lockstep.backends.numpy', None)
    """
    if not hasattr(array, "shape"):
        return None
    return _find_home(array, _ARRAYS) or _find_outside(array)


def list_outside() -> dict[str, str]:
    """Returns the backend modules of other packages, by the name of the framework that each module serves."""
    points = _read_entry_points(tuple(sys.path))
    modules = {_choose_module(points[package]): package for package in sorted(points, reverse=True)}
    return {package: module for module, package in modules.items()}


def load_module(name: str) -> Module:
    """Imports a backend's module by its name, e.g. `lockstep.backends.jax`."""
    return cast(Module, _import(name, name))


def load_array_ops(name: str) -> ArrayOps:
    """Imports the array functions of the backend with this module name."""
    return cast(ArrayOps, _import(f"{name}.array_ops", name))


def _find_home(value: Any, homes: Mapping[str, Home]) -> Home | None:
    """Returns the entry of the innermost package in `homes` that defines the value's class or one of its bases."""
    for kind in type(value).__mro__:
        package = kind.__module__
        while package:
            if package in homes:
                return homes[package]
            package = package.rpartition(".")[0]
    return None


def _find_outside(value: Any) -> str | None:
    """Returns the module that an installed package names as the backend of the value's framework."""
    points = _find_home(value, _read_entry_points(tuple(sys.path)))
    return None if points is None else _choose_module(points)


@functools.lru_cache(maxsize=1)  # because a collective looks up the backend of every array
def _read_entry_points(path: tuple[str, ...]) -> Mapping[str, list["EntryPoint"]]:
    """Returns the entry points by the framework's package that they serve; `path` is `sys.path`, the cache's key."""
    from importlib.metadata import entry_points  # imported here, because it is slow and few scripts need it

    found = defaultdict(list)
    for point in entry_points(group=GROUP):
        found[point.name].append(point)
    return dict(found)


def _choose_module(points: list["EntryPoint"]) -> str:
    """Returns the one backend module of a framework's entry points; raises ModelError if they name several."""
    modules = {point.value: point for point in points}
    if len(modules) > 1:
        claims = " and ".join(sorted(f"{_describe(point)} ({module})" for module, point in modules.items()))
        raise ModelError(
            f"{len(modules)} installed packages have a backend for {points[0].name!r}: {claims}. "
            "Uninstall all but one of these packages."
        )
    return points[0].value


def _import(module: str, backend: str) -> Any:
    """Imports a module of a backend; if the backend belongs to another package, an error names that package."""
    try:
        return import_module(module)
    except Exception as error:
        points = [
            point for each in _read_entry_points(tuple(sys.path)).values() for point in each if point.value == backend
        ]
        if not points:
            raise
        raise ModelError(
            f"The backend for {points[0].name!r} is {backend} of the package {_describe(points[0])}, and {module} "
            f"cannot be imported: {type(error).__name__}: {error}. Install what is missing, or another version of "
            "that package."
        ) from error


def _describe(point: "EntryPoint") -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "?"


def _find_deciding_object(model: Any) -> Any:
    """Returns the object whose class names the framework: the model, or for (apply, variables) a module or variable."""
    if not (isinstance(model, tuple) and len(model) == 2 and callable(model[0])):
        return model
    owner = getattr(model[0], "__self__", model[0])
    if type(owner).__module__.partition(".")[0] in _HOMES or hasattr(owner, "apply"):
        return owner
    return next(_walk_variables(model[1], set()), model[1])


def _walk_variables(value: Any, walked: set[int]) -> Iterator[Any]:
    """Yields the objects of known frameworks in containers and in objects' attributes, such as a dataclass's."""
    if id(value) in walked or isinstance(value, type):
        return
    walked.add(id(value))
    home = _find_home(value, _HOMES) or _find_outside(value)
    if home is not None or isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        yield from (found for each in value.values() for found in _walk_variables(each, walked))
    elif isinstance(value, list | tuple):
        yield from (found for each in value for found in _walk_variables(each, walked))
    elif hasattr(value, "__dict__"):
        yield from (found for each in vars(value).values() for found in _walk_variables(each, walked))
