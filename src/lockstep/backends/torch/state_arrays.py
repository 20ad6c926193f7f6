"""Arrays: tensors and numbers as a state holds them, and back."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from lockstep.backends.base import Array
from lockstep.errors import OptimizerError


def array(value: Any) -> Array:
    """A tensor's bytes as numpy holds them; a plain number keeps its being one."""
    if isinstance(value, bool | int | float):
        return Array(np.asarray(value), "python")
    if not isinstance(value, Tensor):
        raise OptimizerError(
            f"An optimizer's slots are tensors and numbers. Got a {type(value).__name__}. Use another optimizer."
        )
    value = value.detach().cpu().contiguous()
    if value.dtype in (torch.bfloat16,):
        return Array(value.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16), "bfloat16")
    return Array(value.numpy().copy(), str(value.dtype).removeprefix("torch."))


def tensor(array: Array) -> Tensor:
    """The array as a tensor of its type, on the CPU."""
    if array.dtype == "bfloat16":  # which torch does not take from numpy
        return torch.tensor(array.data.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array.data)
