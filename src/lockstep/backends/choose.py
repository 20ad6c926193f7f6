"""Choosing: which backend a model belongs to, without importing any framework.

A model in hand means that its framework is imported already. So it is enough to
look at where the model's classes were defined.
"""

import importlib
from typing import Any, cast

from lockstep.backends.base import Module
from lockstep.errors import ModelError

_HOMES = {
    "torch": "lockstep.backends.torch",
    "lockstep.backends.numpy": "lockstep.backends.numpy",
}


def name_of(model: Any) -> str:
    """The name of the backend's module for this model.

    >>> from lockstep.backends.numpy import Dense
    >>> name_of(Dense([4, 3], seed=0))
    'lockstep.backends.numpy'
    """
    for kind in type(model).__mro__:
        for home, name in _HOMES.items():
            if kind.__module__ == home or kind.__module__.startswith(home + "."):
                return name
    raise ModelError(
        f"A model is a torch.nn.Module. Got {type(model).__module__}.{type(model).__name__}. "
        "Give lockstep.wrap the model itself."
    )


def module(name: str) -> Module:
    """The backend's module, imported now."""
    return cast(Module, importlib.import_module(name))
