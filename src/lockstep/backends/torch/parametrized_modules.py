"""Pickles modules with `torch.nn.utils.parametrize`, whose class torch creates at run time and does not pickle."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize


def reduce_module(module: nn.Module) -> Any:
    """Returns how pickle should store a parametrized module; `NotImplemented`, as pickle wants it, for any other."""
    if not parametrize.is_parametrized(module):
        return NotImplemented
    plain: Any = parametrize.type_before_parametrizations(module)
    return plain.__new__, (plain,), plain.__getstate__(module), None, None, _restore


def _restore(module: Any, state: Any) -> None:
    """Sets the attributes and creates the class; the parametrizations themselves are among the attributes."""
    module.__setstate__(state)
    modules = dict(module._modules)
    for name in module._modules.pop("parametrizations"):
        # A stand-in, because torch creates the class and its property only when something is registered.
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    module._modules.clear()
    module._modules.update(modules)
