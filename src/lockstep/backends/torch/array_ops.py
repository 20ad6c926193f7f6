"""Array functions for PyTorch's tensors on the devices of this process."""

from collections.abc import Sequence
from typing import Any

import torch

SHORT = (torch.float16, torch.bfloat16)  # smaller than the types in which gradients are added


def copy(arrays: Sequence[Any], device: str) -> list[Any]:
    """Returns copies on the device, which need a gradient if the originals do; the copy of a Parameter is one, too.

    If none of the arrays needs a gradient and none is a Parameter, the script has not chosen yet what is trained. Then
    the copies of all floating-point tensors need a gradient.
    """
    plain = not any(array.requires_grad or isinstance(array, torch.nn.Parameter) for array in arrays)

    def copy_one(array: torch.Tensor) -> torch.Tensor:
        fresh = _on(array.detach(), device)
        if isinstance(array, torch.nn.Parameter):
            return torch.nn.Parameter(fresh, requires_grad=array.requires_grad)
        return fresh.requires_grad_(fresh.is_floating_point() if plain else array.requires_grad)

    return [copy_one(array) for array in arrays]


def cut(array: Any, where: Any, device: str) -> Any:
    """Returns a copy of the examples `array[where]` on the device."""
    return _on(array[where], device)


def absent(array: Any) -> str:
    """Returns why the tensor has no values (it is on the device `meta`); an empty string if it has."""
    return "a tensor on the device meta. Materialize it first" if array.is_meta else ""


def check(array: Any) -> str:
    """Returns why a sum cannot replace the tensor's value, e.g. that a graph computed it; an empty string if it can."""
    if array.grad_fn is not None:
        return "a tensor with a graph behind it. Give its .detach(), or the .grad of the parameters"
    strides = zip(array.shape, array.stride(), strict=True) if array.layout is torch.strided else ()
    if any(size > 1 and stride == 0 for size, stride in strides):
        return "a tensor whose elements share memory, as expand() makes them. Give its .clone()"
    return ""


def add(left: Any, right: Any) -> Any:
    """Returns left + right on the left tensor's device."""
    with torch.no_grad():
        return torch.add(left, right.to(left.device))


def widen(array: Any) -> Any:
    """Returns a detached copy; floats shorter than float32 become float32."""
    wide = torch.float32 if array.dtype in (torch.float16, torch.bfloat16) else array.dtype
    return array.detach().to(wide, copy=True)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """Sets each average to decay * average + (1 - decay) * value, in place, with few kernels for all arrays.

    Does not use `lerp` or `addcmul`: they are fused, and would round once instead of three times.
    """
    own = list(averages)
    with torch.no_grad():
        newest = [value.detach().to(average.dtype) for average, value in zip(own, values, strict=True)]
        torch._foreach_mul_(own, decay)
        torch._foreach_add_(own, torch._foreach_mul(newest, 1 - decay))
    return own


def to_numpy(array: Any) -> Any:
    """Returns a numpy copy of the tensor."""
    return array.detach().cpu().numpy().copy()


def from_numpy(data: Any, like: Any) -> Any:
    """Returns a copy of a numpy array on the device of `like`."""
    return torch.tensor(data, device=like.device)


def write(value: Any, target: Any) -> Any:
    """Writes the value into the target and returns the target."""
    with torch.no_grad():
        return target.copy_(value)


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    place = "cpu" if device.startswith("cpu") else device  # torch knows one CPU
    return tensor.to(place, copy=True, memory_format=torch.contiguous_format)


def is_array(value: Any) -> bool:
    """Returns whether the value is a tensor; a Parameter is one, too."""
    return isinstance(value, torch.Tensor)


def as_array(value: Any) -> Any:
    """Returns a number or a list of numbers as a float64 tensor, and a tensor as it is."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def to_host(array: Any) -> Any:
    """Returns the elements in numpy; waits for the GPU if the tensor is on one."""
    return array.detach().cpu().numpy()


def shape(array: Any) -> tuple[int, ...]:
    """Returns the tensor's shape as a tuple; () for a scalar."""
    return tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns the tensor's elements in another shape, as a view if possible."""
    return array.reshape(shape)


def double(array: Any) -> Any:
    """Returns the tensor detached and in float64, the dtype in which losses and metrics are summed."""
    return array.detach().double()


def cast_like(value: Any, array: Any) -> Any:
    """Returns a tensor or a number in the dtype and on the device of `array`; stays in the value's autograd graph."""
    return torch.as_tensor(value).to(array)


def average(array: Any) -> Any:
    """Returns the mean of all elements, in the tensor's dtype."""
    return array.mean()


def average_rows(array: Any, examples: int) -> Any:
    """Returns the mean of every example's elements, as a vector."""
    return array.reshape(examples, -1).mean(1)


def total(array: Any) -> Any:
    """Returns the sum of all elements, in the tensor's dtype."""
    return array.sum()


def scale(array: Any, factor: Any) -> Any:
    """Returns array * factor, for a Python number `factor`."""
    return array * factor


def divide(array: Any, by: Any) -> Any:
    """Returns array / by, in the wider dtype if both are tensors."""
    return array / by


def as_weight(value: Any) -> Any:
    """Returns a number or tensor as a detached float64 tensor."""
    return torch.as_tensor(value).detach().double()


def as_column(weights: Any, values: Any) -> Any:
    """Returns one weight per example, rounded to the dtype of `values`, as float64 in the shape (examples, 1, ...)."""
    return weights.to(values).double().reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """Returns `array` where the condition is true, else `other`, element by element; either may be a number."""
    device = (array if isinstance(array, torch.Tensor) else other).device
    return torch.where(torch.as_tensor(condition, device=device), array, other)


def any_nonzero(array: Any) -> Any:
    """Returns whether any element is not 0; NaN is not 0."""
    return (array != 0).any()


def is_finite_nonzero(value: Any) -> Any:
    """Returns whether a scalar is finite and not 0."""
    value = value.detach()
    return torch.isfinite(value) & (value != 0)


def is_short(array: Any) -> bool:
    """Returns whether the dtype is shorter than float32, the dtype in which gradients are added."""
    return array.dtype in SHORT


def argmax(array: Any, axis: int) -> Any:
    """Returns the positions of the largest elements on the axis."""
    return array.argmax(axis)


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """Returns whether each label is among the `num` largest elements on the axis, by torch's topk."""
    return (array.topk(num, dim=axis).indices == labels.unsqueeze(axis)).any(axis)


def equal(left: Any, right: Any) -> Any:
    """Compares elementwise, in the wider dtype of both tensors."""
    return left == right


def count_true(array: Any) -> Any:
    """Returns the number of true elements, as an int64 scalar."""
    return array.sum()
