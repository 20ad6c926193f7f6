"""Pickles model and optimizer together, so that a worker's optimizer has its model's parameters."""

import copyreg
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from lockstep.backends import pickling
from lockstep.backends.base import Recipe
from lockstep.backends.torch import parametrized_modules, transformers_models
from lockstep.errors import ModelError

# What torch's base class and its schedulers put into every optimizer, beside its hooks.
_TORCHS = {"defaults", "state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called", "_step_count"}
_TORCHS |= {"_warned_capturable_if_run_uncaptured"}


def dump(recipe: Recipe) -> bytes:
    """Returns the recipe in one pickle.

    Tensors are pickled on the CPU: a worker that unpickled them on a GPU would open a context on a GPU that is not
    its own.
    """
    _check_shared_memory(recipe)
    tensors = [tensor for tensor in _find_tensors(recipe) if tensor.device.type != "cpu"]
    placed = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.cpu()
        kinds = {torch.optim.Optimizer: _reduce_optimizer, nn.Module: parametrized_modules.reduce_module}
        reductions = {**kinds, **transformers_models.find_reductions()}
        return pickling.dump(recipe, reductions, has_module_names=not recipe.options.compile)
    except Exception as error:
        raise ModelError(
            f"{_find_culprit(recipe)} cannot be pickled, so it cannot be sent to a worker process: {error}. "
            "Create it in the forward pass, or leave it out with __getstate__; or start the script with torchrun, "
            "whose processes create the model themselves; or use devices=1."
        ) from error
    finally:
        for tensor, data in zip(tensors, placed, strict=True):
            tensor.data = data


def read_own_attributes(optimizer: Any, chosen: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
    """Returns the chosen attributes of an optimizer beside those of torch's base class.

    Torch's own pickle leaves them out.
    """
    return {name: value for name, value in vars(optimizer).items() if _is_own(name) and chosen(value)}


def _is_own(name: str) -> bool:
    return name not in _TORCHS and not (name.startswith("_optimizer_") and name.endswith("_hooks"))


def _reduce_optimizer(optimizer: Any) -> tuple[Any, ...]:
    """Returns how to pickle an optimizer with its own attributes, unless its class defines `__getstate__`."""
    if any("__getstate__" in vars(kind) for kind in type(optimizer).__mro__[: -len(torch.optim.Optimizer.__mro__)]):
        reduced: tuple[Any, ...] = optimizer.__reduce_ex__(4)
        return reduced
    state = {**optimizer.__getstate__(), **read_own_attributes(optimizer)}
    return copyreg.__newobj__, (type(optimizer),), state  # type: ignore[attr-defined]  # pickle's own


def _find_tensors(recipe: Recipe) -> list[Tensor]:
    modules = [part for part in (recipe.model, recipe.loss) if isinstance(part, nn.Module)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    slots = [value for slots in recipe.optimizer.state.values() for value in slots.values()]
    return tensors + [value for value in slots if isinstance(value, Tensor)]


def _check_shared_memory(recipe: Recipe) -> None:
    """Raises ModelError for different tensors that share memory: after unpickling, each would have its own."""
    found = {
        id(tensor): (prefix + name, tensor)
        for prefix, part in (("", recipe.model), ("loss.", recipe.loss))
        if isinstance(part, nn.Module)
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
        if tensor.numel()
    }
    extents = [(tensor.device.index or 0, *_extent(tensor), name) for name, tensor in found.values()]
    end, last = (-1, 0), ""
    for device, start, stop, name in sorted(extents, key=lambda extent: extent[:2]):
        if (device, start) < end:
            raise ModelError(
                f"{last!r} and {name!r} are two tensors that share memory. They are sent to the workers separately, "
                "so the workers' copies would not share memory. Use one tensor for both (b.weight = a.weight), "
                "replace one by its clone(), or use devices=1."
            )
        end, last = (device, stop), name


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor's first byte and of the byte after its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()


def _find_culprit(recipe: Recipe) -> str:
    """Returns the name of the first part of the recipe that cannot be pickled, for an error."""
    for path, module in recipe.model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_modules", "_parameters", "_buffers") and not _is_picklable(value):
                return f"The attribute {'.'.join(filter(None, (path, name)))!r} of type {type(value).__name__}"
    for name, value in read_own_attributes(recipe.optimizer).items():
        if not _is_picklable(value):
            return f"The optimizer's attribute {name!r} of type {type(value).__name__}"
    for part in ("optimizer", "loss", "metrics"):
        if not _is_picklable(getattr(recipe, part)):
            return f"The {part}"
    return "The model"


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
