"""Pickling: model and optimizer in one piece, so that a worker's optimizer holds its model's parameters."""

from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from lockstep.backends.base import Recipe
from lockstep.errors import ModelError


def dump(recipe: Recipe) -> bytes:
    """One pickle of the recipe.

    Tensors travel on the CPU: a worker that unpickled them on a GPU would open a
    context on a GPU that is not its own.
    """
    tensors = [tensor for tensor in _tensors(recipe) if tensor.device.type != "cpu"]
    placed = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.cpu()
        dumped: bytes = cloudpickle.dumps(recipe)
        return dumped
    except Exception as error:
        raise ModelError(
            f"A worker process gets the model by pickle. {_culprit(recipe)} cannot be pickled: {error}. "
            "Make it in the forward pass, or leave it out with __getstate__; or use devices=1."
        ) from error
    finally:
        for tensor, data in zip(tensors, placed, strict=True):
            tensor.data = data


def _tensors(recipe: Recipe) -> list[Tensor]:
    modules = [part for part in (recipe.model, recipe.loss) if isinstance(part, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    slots = [value for slots in recipe.optimizer.state.values() for value in slots.values()]
    return tensors + [value for value in slots if isinstance(value, Tensor)]


def _culprit(recipe: Recipe) -> str:
    """The first attribute that does not survive a pickle, by name."""
    for path, module in recipe.model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_modules", "_parameters", "_buffers") and not _picklable(value):
                return f"The attribute {'.'.join(filter(None, (path, name)))!r} of type {type(value).__name__}"
        if torch.nn.utils.parametrize.is_parametrized(module):
            return f"The parametrized module {path or type(module).__name__!r}"
    for part in ("optimizer", "loss", "metrics"):
        if not _picklable(getattr(recipe, part)):
            return f"The {part}"
    return "The model"


def _picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
