"""Gradients: from the parameters into the leaf of a shard."""

from collections.abc import Container

import torch
from torch import Tensor

from lockstep.backends.torch.loss_scaler import HALF
from lockstep.errors import ModelError


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def copy_gradients(trained: list[Tensor], fields: list[Tensor], share: float, cast: Container[int]) -> list[int]:
    """Copies every gradient times its share into the leaf and flags those that were there; others count as zero."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    there: list[int] = []
    for parameter, field in zip(trained, fields, strict=True):
        gradient = parameter.grad
        there.append(0 if gradient is None else 1 + HALF * (id(parameter) in cast or gradient.dtype == torch.float16))
        if gradient is None:
            field.zero_()
        elif gradient.layout != torch.strided:
            raise ModelError("Gradients are dense. Got a sparse one. Use torch.nn.Embedding(..., sparse=False).")
        else:
            targets.append(field)
            sources.append(real(gradient))
    if targets:
        torch._foreach_copy_(targets, sources)
        if share != 1.0:
            torch._foreach_mul_(targets, share)
    return there
