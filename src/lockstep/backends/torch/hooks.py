"""Hooks of the script's optimizer and parameters, none of which a pickle contains.

Each process counts its own. Workers have none; processes that run the whole script have them all.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.modules import module
from torch.optim import optimizer as optim

from lockstep.errors import ModelError, OptimizerError

_MODULES = ("forward_pre", "forward", "backward_pre", "backward")


def count(optimizer: Any, parameters: Iterable[Tensor]) -> dict[str, int]:
    """How many there are of each kind; a step that was put in the place of the optimizer's own is one of them."""
    held = [getattr(each, name) for each in parameters for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    steps = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    steps += [optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks]
    return {
        "optimizer": sum(map(len, steps)),
        "parameter": sum(len(each) for each in held if each),
        "module": sum(len(getattr(module, f"_global_{name}_hooks")) for name in _MODULES),
        "step": int(_replaced(optimizer)),
    }


def writes_gradients(optimizer: Any) -> bool:
    """Whether somebody gets hold of the gradients before the optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optim._global_optimizer_pre_hooks or _replaced(optimizer))


def check(here: Mapping[str, int], there: Mapping[str, int]) -> None:
    """Refuses what the script's process has and this one lacks."""
    if there["optimizer"] != here["optimizer"]:
        raise OptimizerError(
            "An optimizer's step hooks do not travel to the workers. Got an optimizer with hooks. "
            "Do their work between the steps, or use devices=1."
        )
    if there["step"] != here["step"]:
        raise OptimizerError(
            "An optimizer's step is its class's, also in the workers. Got an optimizer whose `step` was replaced. "
            "Make a class of it that has this step, or use devices=1."
        )
    if there["parameter"] != here["parameter"]:
        raise ModelError(
            "A parameter's hooks do not travel to the workers. Got a parameter with hooks. "
            "Do their work in the optimizer's step or in the forward pass, or use devices=1."
        )
    if there["module"] != here["module"]:
        raise ModelError(
            "Hooks for all modules do not travel to the workers. Got some in torch.nn.modules.module. "
            "Register them on the model's own modules before lockstep.wrap, or use devices=1."
        )


def _replaced(optimizer: Any) -> bool:
    """Whether the object has a step of its own; a scheduler's only counts the calls."""
    step = vars(optimizer).get("step")
    return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)
