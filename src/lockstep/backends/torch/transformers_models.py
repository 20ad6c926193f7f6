"""Prepares models of Hugging Face's transformers, which records outputs such as `hidden_states` outside of the models.

Since version 5 a model's constructor registers what the model's class can record in a global table. Unpickling does not
call the constructor, so the forward pass of an unpickled model would find nothing in the table. Outputs are recorded by
hooks, which the first forward pass that records something installs. Lockstep installs the hooks when the model is
wrapped, so that every process has them, whenever it begins.
"""

import copy
import copyreg
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

_INSTALLED = "_output_capturing_hooks_installed"


def prepare(model: nn.Module) -> None:
    """Registers what the Hugging Face models in this model can record, and installs transformers' hooks for it."""
    capturing, models = _find_library(), sys.modules.get("transformers.modeling_utils")
    if capturing is None or models is None:
        return
    found = [module for module in model.modules() if isinstance(module, models.PreTrainedModel)]
    for module in {type(module): module for module in found}.values():
        created = copyreg.__newobj__(type(module))  # type: ignore[attr-defined]  # pickle's own
        models.PreTrainedModel.__init__(created, copy.deepcopy(module.config))
    for module in found:  # outer models come first, and install those of inner ones
        if not any(hasattr(inner, _INSTALLED) for inner in module.modules()):
            capturing.maybe_install_capturing_hooks(module)


def find_reductions() -> Mapping[type, Any]:
    """Returns {type: reduce function} for the context variable of the hooks, a global of transformers."""
    capturing = _find_library()
    if capturing is None:
        return {}
    own = {name: value for name, value in vars(capturing).items() if type(value).__module__ == capturing.__name__}
    names = {id(value): name for name, value in own.items()}
    return {type(value): lambda value: names.get(id(value), NotImplemented) for value in own.values()}


def _find_library() -> Any:
    """Returns the module of transformers 5 with the hooks; None if the script has not imported it."""
    return sys.modules.get("transformers.utils.output_capturing")
