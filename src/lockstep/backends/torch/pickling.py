"""Pickling: model and optimizer in one piece, so that a worker's optimizer holds its model's parameters."""

import copyreg
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from lockstep.backends import pickling
from lockstep.backends.base import Recipe
from lockstep.backends.torch.unsupported import check_apart
from lockstep.errors import ModelError

# What torch's base class and its schedulers put into every optimizer, beside its hooks.
_TORCHS = {"defaults", "state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called", "_step_count"}
_TORCHS |= {"_warned_capturable_if_run_uncaptured"}


def dump(recipe: Recipe) -> bytes:
    """One pickle of the recipe.

    Tensors travel on the CPU: a worker that unpickled them on a GPU would open a
    context on a GPU that is not its own.
    """
    _check_apart(recipe)
    tensors = [tensor for tensor in _tensors(recipe) if tensor.device.type != "cpu"]
    placed = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.cpu()
        return pickling.dump(recipe, {torch.optim.Optimizer: _whole})
    except Exception as error:
        raise ModelError(
            f"A worker process gets the model by pickle. {_culprit(recipe)} cannot be pickled: {error}. "
            "Make it in the forward pass, or leave it out with __getstate__; or use devices=1."
        ) from error
    finally:
        for tensor, data in zip(tensors, placed, strict=True):
            tensor.data = data


def own_attributes(optimizer: Any, chosen: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
    """What an optimizer holds beside what torch's base class gives it, where it is chosen.

    Torch's own pickle leaves it out.
    """
    return {name: value for name, value in vars(optimizer).items() if _is_own(name) and chosen(value)}


def _is_own(name: str) -> bool:
    return name not in _TORCHS and not (name.startswith("_optimizer_") and name.endswith("_hooks"))


def _whole(optimizer: Any) -> tuple[Any, ...]:
    """An optimizer with its own attributes, unless its class says what travels."""
    if any("__getstate__" in vars(kind) for kind in type(optimizer).__mro__[: -len(torch.optim.Optimizer.__mro__)]):
        reduced: tuple[Any, ...] = optimizer.__reduce_ex__(4)
        return reduced
    state = {**optimizer.__getstate__(), **own_attributes(optimizer)}
    return copyreg.__newobj__, (type(optimizer),), state  # type: ignore[attr-defined]  # pickle's own


def _tensors(recipe: Recipe) -> list[Tensor]:
    modules = [part for part in (recipe.model, recipe.loss) if isinstance(part, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    slots = [value for slots in recipe.optimizer.state.values() for value in slots.values()]
    return tensors + [value for value in slots if isinstance(value, Tensor)]


def _check_apart(recipe: Recipe) -> None:
    named: dict[str, Tensor] = {}
    for prefix, part in (("", recipe.model), ("loss.", recipe.loss)):
        if isinstance(part, nn.Module):
            named |= {prefix + name: tensor for name, tensor in (*part.named_parameters(), *part.named_buffers())}
    check_apart(named)


def _culprit(recipe: Recipe) -> str:
    """The first attribute that does not survive a pickle, by name."""
    for path, module in recipe.model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_modules", "_parameters", "_buffers") and not _picklable(value):
                return f"The attribute {'.'.join(filter(None, (path, name)))!r} of type {type(value).__name__}"
        if torch.nn.utils.parametrize.is_parametrized(module):
            return f"The parametrized module {path or type(module).__name__!r}"
    for name, value in own_attributes(recipe.optimizer).items():
        if not _picklable(value):
            return f"The optimizer's attribute {name!r} of type {type(value).__name__}"
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
