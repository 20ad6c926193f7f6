"""Rejects models and optimizers that cannot be trained in parallel as they are, and says what to change."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optim

from lockstep.errors import ModelError, OptimizerError

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_GLOBAL_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")


def check_model(model: Any) -> None:
    """Raises for a model that another tool distributes or compiles, or that has lazy, sparse or synchronized layers."""
    if isinstance(model, _WRAPPERS):
        raise ModelError(
            f"The model is already wrapped in {type(model).__name__}, but Lockstep does the distribution. Wrap the "
            "plain model: lockstep.wrap(model.module, ...)."
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ModelError(
            "The model is compiled with torch.compile, but Lockstep needs the plain model, because each shard runs at "
            "its own shape. Wrap the plain model: lockstep.wrap(model._orig_mod, ...), on CPUs with compile=True to "
            "have it compiled."
        )
    for name, module in model.named_modules():
        if any(map(nn.parameter.is_lazy, [*module._parameters.values(), *module._buffers.values()])):
            raise ModelError(
                f"The {type(module).__name__} at {name!r} takes its shape from the first batch, but the model's "
                "parameters must exist when it is wrapped. Call the model once on a batch before lockstep.wrap."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"The SyncBatchNorm at {name!r} is not supported, because each shard has its own batch norm "
                "statistics. Use BatchNorm1d, BatchNorm2d or BatchNorm3d; for statistics over the whole batch use "
                "shards=1."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(f"The module {name!r} has sparse=True, which is not supported. Use sparse=False.")


def check_optimizer(optimizer: Any, names: dict[int, str]) -> None:
    """Raises for an optimizer that calls the model itself, or that has parameters of another model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"A PyTorch model needs a torch.optim optimizer. Got {type(optimizer).__name__}. "
            "Use for example torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS is not supported, because it evaluates the model several times a step. "
            "Use another optimizer, such as torch.optim.Adam."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError("SparseAdam is not supported, because sparse gradients are not. Use torch.optim.Adam.")
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
            raise OptimizerError(
                f"{type(optimizer).__name__} has a second optimizer, {name!r}, whose state no checkpoint would "
                "contain, because only an optimizer's own `state` is saved. Define a subclass of "
                f"{type(inner).__name__} that does the rest in `step` and keeps tensors in self.state[parameter]."
            )
    others = sum(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"])
    if others:
        raise OptimizerError(
            f"{others} of the optimizer's parameters did not come from this model. Create the optimizer from the "
            "model: torch.optim.SGD(model.parameters(), lr=0.1). If the parameters belong to a loss or to another "
            "network, wrap one module that has both: nn.ModuleDict({'net': net, 'loss': loss}), with an objective that "
            "calls both."
        )


def count_hooks(optimizer: Any, parameters: Iterable[Tensor]) -> dict[str, int]:
    """Returns the number of hooks of each kind, a replaced `optimizer.step` among them; no pickle contains them."""
    held = [getattr(each, name) for each in parameters for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    steps = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    steps += [optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks]
    return {
        "optimizer": sum(map(len, steps)),
        "parameter": sum(len(each) for each in held if each),
        "module": sum(len(getattr(module_hooks, f"_global_{name}_hooks")) for name in _GLOBAL_HOOKS),
        "step": int(has_replaced_step(optimizer)),
    }


def check_hooks(own: Mapping[str, int], script: Mapping[str, int]) -> None:
    """Raises if the script's process has hooks that this process lacks, because hooks are not pickled."""
    if script["optimizer"] != own["optimizer"]:
        raise OptimizerError(
            "The optimizer has step hooks, which are not sent to the workers. "
            "Do their work between gradients = trainer.gradients(batch) and trainer.apply(gradients), or use devices=1."
        )
    if script["step"] != own["step"]:
        raise OptimizerError(
            "The optimizer's `step` was replaced, but workers use the `step` of its class. "
            "Define a subclass with this step, or use devices=1."
        )
    if script["parameter"] != own["parameter"]:
        raise ModelError(
            "A parameter has hooks, which are not sent to the workers. "
            "Do their work on gradients = trainer.gradients(batch) before trainer.apply(gradients), or use devices=1."
        )
    if script["module"] != own["module"]:
        raise ModelError(
            "torch.nn.modules.module has hooks for all modules, which are not sent to the workers. "
            "Register them on the model's own modules before lockstep.wrap, or use devices=1."
        )


def has_replaced_step(optimizer: Any) -> bool:
    """Returns whether `optimizer.step` was replaced; a scheduler's wrapper, which only counts the calls, is allowed."""
    step = vars(optimizer).get("step")
    return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)
