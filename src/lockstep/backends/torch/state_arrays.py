"""Converts tensors and plain numbers to the arrays of a state, and back."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from lockstep.core.state import ArraySpec
from lockstep.core.types import Array
from lockstep.errors import OptimizerError

_NUMBER = "python"  # the dtype of a plain Python number, which comes back as one


def to_array(value: Any) -> Array:
    """Copies a tensor or a plain number to the host."""
    if isinstance(value, bool | int | float):
        return Array(np.asarray(value), _NUMBER)
    value = _check_tensor(value).detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return Array(value.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16), "bfloat16")
    return Array(value.numpy().copy(), _dtype_name(value))


def to_tensor(array: Array) -> Tensor:
    """Copies an array into a tensor of its dtype, on the CPU."""
    if array.dtype == "bfloat16":  # which torch does not take from numpy
        return torch.tensor(array.data.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array.data)


def to_optimizer_value(array: Array, parameter: Tensor) -> Any:
    """Returns a copy of an array of the optimizer state in the form that the optimizer has for this parameter.

    That is a plain number, or a tensor on the parameter's device. A tensor of the parameter's shape gets its strides,
    too, because a fused optimizer reads the memory of both in the same order. A scalar stays on the CPU.
    """
    if array.dtype == _NUMBER:
        return array.data.item()
    tensor = to_tensor(array)
    if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device) if tensor.dim() else tensor


def read_spec(value: Any) -> ArraySpec:
    """Returns the shape and dtype that `to_array` gives this value."""
    if isinstance(value, bool | int | float):
        return ArraySpec((), _NUMBER)
    return ArraySpec(tuple(_check_tensor(value).shape), _dtype_name(value))


def _check_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise OptimizerError(
            f"The optimizer's state has a value of type {type(value).__name__}, but only tensors and numbers can be "
            "saved. Use another optimizer, or a subclass whose `step` ends by storing each tensor under a key of its "
            "own, and begins by restoring the optimizer's own form."
        )
    return value


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
