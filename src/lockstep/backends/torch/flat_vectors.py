"""Partial sums as flat vectors, in the device's own memory or in memory that an exchange provides.

An exchange's memory is on the host. A GPU first writes a shard's arrays into a partial sum in its own memory and then
copies whole vectors: copying array by array would synchronize once for each array.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.backends.torch.gradients import to_real
from lockstep.core.layout import Layout
from lockstep.core.types import PartialSum

_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


def choose_sum_type(tensor: Tensor) -> str:
    """Returns the dtype in which such tensors are added: int64 for integers, float64 for float64, else float32."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return "int64"
    return "float64" if tensor.dtype in (torch.float64, torch.complex128) else "float32"


@lru_cache
def create_scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a scalar tensor, which is cached and must not be written to."""
    return torch.tensor(value, dtype=dtype, device=device)


class LeafArrays(NamedTuple):
    """The gradients and buffers in the partial sum of one shard or of all; a missing gradient is None."""

    gradients: list[Any]
    buffers: list[Tensor]
    averaged: Sequence[Tensor] = ()  # one vector for all float buffers of a type


class SingleLeaf(dict[str, Tensor]):
    """The partial sum of a step's only shard: the gradients where the backward pass has left them, not copied."""

    def __init__(self, fields: LeafArrays) -> None:
        super().__init__()
        self.fields = fields


class FlatVectors(dict[str, Tensor]):
    """A partial sum: one vector for each dtype, and the gradients and buffers as views of them."""

    def __init__(self, vectors: Mapping[str, Tensor], layout: Layout, num_trained: int) -> None:
        super().__init__(vectors)
        self.layout = layout
        self.num_trained = num_trained
        self.device_type = next((vector.device.type for vector in vectors.values()), "")
        views = [
            self[field.dtype][field.offset : field.offset + field.size].view(field.shape) for field in layout.fields
        ]
        ends = {dtype: layout.divided.get(dtype, 0) for dtype in self if dtype != "int64"}  # of the gradients
        averaged = [self[dtype][end:] for dtype, end in ends.items() if end < layout.lengths[dtype]]
        self.fields = LeafArrays(views[:num_trained], views[num_trained:], averaged)

    @classmethod
    def allocate(cls, device: torch.device, layout: Layout, num_trained: int) -> "FlatVectors":
        """Returns a partial sum of zeros in new memory on the device."""
        lengths = layout.lengths.items()
        vectors = {dtype: torch.zeros(length, dtype=_TYPES[dtype], device=device) for dtype, length in lengths}
        return cls(vectors, layout, num_trained)

    @classmethod
    def wrap_memory(cls, memory: memoryview, layout: Layout, num_trained: int) -> "FlatVectors":
        """Returns a partial sum in host memory that an exchange provides."""
        vectors = {
            dtype: torch.frombuffer(memory, dtype=_TYPES[dtype], count=length, offset=layout.starts[dtype])
            for dtype, length in layout.lengths.items()
        }
        return cls(vectors, layout, num_trained)


def copy_to(source: PartialSum, out: PartialSum | None) -> PartialSum:
    """Copies a partial sum into `out`, which it returns; writes zeros for gradients that are None."""
    assert out is not None
    for dtype, vector in source.items():
        out[dtype].copy_(vector)
    if isinstance(source, SingleLeaf):
        assert isinstance(out, FlatVectors)
        for own, array in zip(chain(*out.fields[:2]), chain(*source.fields[:2]), strict=True):
            if array is None:
                own.zero_()
            else:
                own.copy_(to_real(array))
    return out


class DeviceCopy:
    """A partial sum on the device that stands for one in host memory; reused from step to step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: FlatVectors | None = None

    def get(self, total: PartialSum) -> FlatVectors:
        """Returns the partial sum itself if it is on the device, else memory on the device with unspecified values."""
        assert isinstance(total, FlatVectors)
        if total.device_type == self._device.type:
            return total
        if self._own is None or self._own.layout is not total.layout:
            self._own = FlatVectors.allocate(self._device, total.layout, total.num_trained)
        return self._own

    def fill(self, total: PartialSum) -> FlatVectors:
        """Returns the partial sum itself if it is on the device, else a copy there."""
        near = self.get(total)
        if near is not total:
            copy_to(total, near)
        return near
