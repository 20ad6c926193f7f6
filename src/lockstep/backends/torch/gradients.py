"""Moves gradients from the parameters into a shard's partial sum, and from the total to the optimizer."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optim

from lockstep.backends.torch import rng
from lockstep.backends.torch.loss_scaler import HALF
from lockstep.backends.torch.unsupported import has_replaced_step
from lockstep.core import seeds
from lockstep.core.types import Work
from lockstep.errors import ModelError

_ENGINE: Any = torch.autograd.Variable._execution_engine
LARGE = 1 << 18  # elements; the copies of smaller gradients cost more one by one than all at once
_PLAIN = {(dtype, torch.strided) for dtype in (torch.float32, torch.float64, torch.bfloat16)}
_read_form = attrgetter("dtype", "layout")


def to_real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor viewed as pairs of real numbers; a real tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def has_large(trained: Iterable[Tensor]) -> bool:
    """Returns whether a parameter is large enough for `move_large_gradients`."""
    return any(parameter.numel() >= LARGE for parameter in trained)


@contextmanager
def move_large_gradients(trained: Sequence[Tensor], fields: Sequence[Tensor]) -> Iterator[set[int]]:
    """A context in which the backward pass moves each large gradient to the partial sum as soon as it is complete.

    So a model's gradients are not in memory twice. Only gradients of the sum's dtype are moved. Yields the ids of the
    parameters whose gradients were moved; these parameters have no `grad` afterwards.
    """
    moved: set[int] = set()

    def build_hook(field: Tensor) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:  # which `check_dense` refuses
                return
            if id(parameter) in moved:  # a checkpointed block makes a backward pass of its own
                field.add_(gradient)
            else:
                field.copy_(gradient)
                moved.add(id(parameter))
            parameter.grad = None

        return move

    handles = [
        parameter.register_post_accumulate_grad_hook(build_hook(field))  # type: ignore[no-untyped-call]
        for parameter, field in zip(trained, fields, strict=True)
        if field.numel() >= LARGE and parameter.dtype == field.dtype and parameter.requires_grad
    ]
    try:
        yield moved
    finally:
        for handle in handles:
            handle.remove()


def read_gradients(trained: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients, which must be dense; None for a parameter that has none."""
    found: list[Any] = [parameter.grad for parameter in trained]
    if not _are_plain(found):
        found = [None if gradient is None else to_real(gradient) for gradient in found]
        check_dense(found)
    return found


def copy_gradients(
    trained: list[Tensor], fields: list[Tensor], share: float, cast: Container[int], moved: Container[int] = ()
) -> list[int]:
    """Writes each gradient times `share` to `fields`, the partial sum's views; returns a flag for each parameter.

    A flag is 0 if there was no gradient, else 1, plus HALF if the gradient was float16.

    A missing gradient counts as zero. `cast` has the ids of parameters that the backward pass had in float16, and
    `moved` those of parameters whose gradients are in the partial sum already.
    """
    found: list[Any] = [parameter.grad for parameter in trained]
    targets, own, sources, flags = fields, fields, found, [1] * len(found)
    if _are_plain(found) and not cast:
        torch._foreach_copy_(targets, sources)
        if share != 1.0:
            torch._foreach_mul_(targets, share)
        return flags
    if any(gradient is None or gradient.is_complex() for gradient in found):
        flags = [int(each.grad is not None or id(each) in moved) for each in trained]
        targets = [field for field, flag in zip(fields, flags, strict=True) if flag]
        own = [field for field, gradient in zip(fields, found, strict=True) if gradient is not None]
        sources = [to_real(gradient) for gradient in found if gradient is not None]
        for field, flag in zip(fields, flags, strict=True):
            if not flag:
                field.zero_()
    check_dense(sources)
    if own:
        torch._foreach_copy_(own, sources)
    if targets and share != 1.0:
        torch._foreach_mul_(targets, share)
    if cast or any(gradient.dtype == torch.float16 for gradient in sources):
        halves = [id(each) in cast or each.dtype == torch.float16 for each in trained]
        flags = [flag + HALF * (flag and half) for flag, half in zip(flags, halves, strict=True)]
    return flags


def _are_plain(gradients: Iterable[Any]) -> bool:
    """Returns whether every gradient exists and is dense, real and not float16."""
    try:
        return _PLAIN.issuperset(map(_read_form, gradients))
    except AttributeError:  # one is None
        return False


def run_backward(root: Tensor) -> None:
    """Does what `root.backward()` does, without its argument checks, which take as long as a small layer's pass."""
    if type(root) is not Tensor:
        root.backward()  # type: ignore[no-untyped-call]
        return
    _ENGINE.run_backward(
        (root,), (torch.ones_like(root),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def check_dense(gradients: Iterable[Tensor | None]) -> None:
    """Raises ModelError if a gradient is sparse, e.g. that of an embedding."""
    if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
        raise ModelError(
            "A parameter has got a sparse gradient, which is not supported. Use torch.nn.Embedding(..., sparse=False)."
        )


def mark_nonzero(flags: Sequence[float], gradients: Sequence[Tensor]) -> list[float]:
    """Returns the flags, with 1 for each parameter that no shard has used but to which the script gave a gradient."""
    return [flag or int(gradient.any()) for flag, gradient in zip(flags, gradients, strict=True)]


def set_gradients(optimizer: Any, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Sets each parameter's `grad` to its gradient, or to a copy if the optimizer may write to it."""
    copied = _may_write(optimizer)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = torch.view_as_complex(gradient) if parameter.is_complex() else gradient
        if own.stride() == parameter.stride():
            same = own.dtype == parameter.dtype and not copied
            parameter.grad = own if same else own.to(parameter.dtype, copy=copied)
        else:  # a fused optimizer walks the memory of both side by side
            parameter.grad = torch.empty_like(parameter).copy_(own)


def clip_gradients(gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    """Returns the gradients, scaled down if their global norm is larger than `max_norm`."""
    factor = torch.clamp(max_norm / (torch.nn.utils.get_total_norm(gradients) + 1e-6), max=1.0)
    return list(torch._foreach_mul(gradients, factor))


def make_update(optimizer: Any, work: Work, device: torch.device) -> None:
    """Calls the optimizer's step; if it may draw random numbers, it draws the same ones on every replica."""
    if not _runs_other_code(optimizer):
        optimizer.step()
        return
    with rng.preserve(device):
        rng.seed_generators(seeds.update(work.seed, work.step), device)
        optimizer.step()


def _runs_other_code(optimizer: Any) -> bool:
    """Returns whether a step runs code that is not torch's: another optimizer's, hooks, or a replaced method."""
    own = type(optimizer).__module__.startswith("torch.optim")
    before = optimizer._optimizer_step_pre_hooks or optim._global_optimizer_pre_hooks
    after = optimizer._optimizer_step_post_hooks or optim._global_optimizer_post_hooks
    return not own or bool(before or after) or has_replaced_step(optimizer)


def _may_write(optimizer: Any) -> bool:
    """Returns whether the optimizer may write to the gradients, which other processes read, too.

    Among torch's own optimizers only the foreach form of Nesterov momentum does. Other optimizers and hooks may do
    anything.
    """
    nesterov = any(group.get("nesterov") and group.get("foreach") is not False for group in optimizer.param_groups)
    return nesterov or _runs_other_code(optimizer)
