"""PyTorch's tensors on the devices of this process; what belongs to a graph stays out of the sums."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

SHORT = (torch.float16, torch.bfloat16)  # shorter than the types in which gradients are added


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


def is_array(value: Any) -> bool:
    """Parameters are tensors too."""
    return isinstance(value, torch.Tensor)


def as_array(value: Any) -> Any:
    """Numbers in float64, which holds any that a script may write."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def to_host(array: Any) -> Any:
    """Waits for a GPU."""
    return array.detach().cpu().numpy()


def shape(array: Any) -> tuple[int, ...]:
    """Of a tensor."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """A view if there is one."""
    return array.reshape(shape)


def double(array: Any) -> Any:
    """float64, without a graph."""
    return array.detach().double()


def cast_like(value: Any, array: Any) -> Any:
    """In the graph, if the value is in one."""
    return torch.as_tensor(value).to(array)


def average(array: Any) -> Any:
    """torch's mean."""
    return array.mean()


def average_rows(array: Any, examples: int) -> Any:
    """torch's mean of every row."""
    return array.reshape(examples, -1).mean(1)


def total(array: Any) -> Any:
    """torch's sum."""
    return array.sum()


def scale(array: Any, factor: Any) -> Any:
    """By a plain number."""
    return array * factor


def divide(array: Any, by: Any) -> Any:
    """In the wider type of two tensors."""
    return array / by


def as_weight(value: Any) -> Any:
    """float64."""
    return torch.as_tensor(value).detach().double()


def as_column(weights: Any, values: Any) -> Any:
    """Rounded to the type of `values`, as those are that the values are multiplied by."""
    return weights.to(values).double().reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """One of the last two may be a number."""
    device = (array if isinstance(array, torch.Tensor) else other).device
    return torch.where(torch.as_tensor(condition, device=device), array, other)


def any_nonzero(array: Any) -> Any:
    """NaN is not 0."""
    return (array != 0).any()


def is_finite_nonzero(value: Any) -> Any:
    """Of one number."""
    value = value.detach()
    return torch.isfinite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Smaller floats are added in float32."""
    return array.dtype in SHORT


def argmax(array: Any, axis: int) -> Any:
    """torch's argmax."""
    return array.argmax(axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """torch's topk."""
    return (array.topk(num, dim=axis).indices == labels.unsqueeze(axis)).any(axis)


def equal(left: Any, right: Any) -> Any:
    """In the wider type."""
    return left == right


def count_true(array: Any) -> Any:
    """In int64."""
    return array.sum()


def join(parts: Iterable[tuple[Any, float]], device: Any) -> torch.Tensor:
    """One float64 vector of numbers and tensors, each times a plain number."""
    with torch.no_grad():
        vectors = [
            torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(-1) * times
            for value, times in parts
        ]
        return torch.cat(vectors)
