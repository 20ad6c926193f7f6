"""PyTorch's tensors on the devices of this process; what belongs to a graph stays out of the sums."""

from collections.abc import Sequence
from typing import Any

import torch


def copy(array: Any, device: str) -> Any:
    """A leaf that needs a gradient where the original does; a parameter stays one."""
    fresh = _on(array.detach(), device)
    if isinstance(array, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, requires_grad=array.requires_grad)
    return fresh.requires_grad_(array.requires_grad)


def cut(array: Any, where: Any, device: str) -> Any:
    """A copy of some examples."""
    return _on(array[where], device)


def absent(array: Any) -> str:
    """Only a tensor of the device `meta` has no values."""
    return "a tensor on the device meta. Materialize it first" if array.is_meta else ""


def check(array: Any) -> str:
    """A value that a graph has made would no longer be what the graph says."""
    if array.grad_fn is not None:
        return "a tensor with a graph behind it. Give its .detach(), or the .grad of the parameters"
    if array.layout is torch.strided and any(map(_shared, array.shape, array.stride())):
        return "a tensor whose elements share memory, as expand() makes them. Give its .clone()"
    return ""


def add(left: Any, right: Any) -> Any:
    """The addition of the left tensor's device."""
    with torch.no_grad():
        return torch.add(left, right.to(left.device))


def widen(array: Any) -> Any:
    """A copy without a graph."""
    wide = torch.float32 if array.dtype in (torch.float16, torch.bfloat16) else array.dtype
    return array.detach().to(wide, copy=True)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """In place, all arrays in a few kernels. `lerp` and `addcmul` are fused, and would round once instead of thrice."""
    own = list(averages)
    with torch.no_grad():
        newest = [value.detach().to(average.dtype) for average, value in zip(own, values, strict=True)]
        torch._foreach_mul_(own, decay)
        torch._foreach_add_(own, torch._foreach_mul(newest, 1 - decay))
    return own


def to_numpy(array: Any) -> Any:
    """A copy on the host."""
    return array.detach().cpu().numpy().copy()


def from_numpy(data: Any, like: Any) -> Any:
    """A copy on the device."""
    return torch.tensor(data, device=like.device)


def write(value: Any, target: Any) -> Any:
    """In place."""
    with torch.no_grad():
        return target.copy_(value)


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    place = "cpu" if device.startswith("cpu") else device  # torch knows one CPU
    return tensor.to(place, copy=True, memory_format=torch.contiguous_format)


def _shared(size: int, stride: int) -> bool:
    """Whether the entries along an axis lie in one place."""
    return size > 1 and stride == 0
