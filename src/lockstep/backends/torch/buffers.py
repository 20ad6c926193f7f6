"""Buffers: running statistics and counters, the same for every shard and averaged by the tree.

A shard's forward pass writes to the model's buffers. Its result goes into the leaf
and the model gets back what it had, so that the next shard starts from the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Buffer(NamedTuple):
    """A buffer's place in the model; a module may put a new tensor there."""

    name: str
    module: nn.Module
    key: str

    @property
    def state_name(self) -> str:
        """Its name in the state: what the model's own `state_dict` leaves out is not filed under `model`."""
        hidden = self.key in self.module._non_persistent_buffers_set
        return f"{'buffers' if hidden else 'model'}.{self.name}"

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor


def of(model: nn.Module) -> list[Buffer]:
    """Every buffer of the model, persistent or not."""
    return [
        Buffer(f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key, tensor in module._buffers.items()
        if tensor is not None
    ]


def differing(ones: list[Tensor], others: list[Tensor]) -> list[bool]:
    """For each pair whether the bytes differ; a GPU is waited for once, not once for each.

    Version counters do not tell: torch's batch norm writes its statistics behind their back.
    """
    flags = [(_raw(one) != _raw(other)).any() for one, other in zip(ones, others, strict=True)]
    found: list[bool] = torch.stack(flags).tolist() if flags else []
    return found


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class Statistics:
    """The buffers during one step: `keep` them, `collect` each shard's, `restore` what they were.

    Complex buffers are constants such as rotary frequencies and are left alone.
    """

    def __init__(self, buffers: list[Buffer]) -> None:
        self.averaged = [buffer for buffer in buffers if not buffer.tensor.is_complex()]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Remembers the buffers as they are before the step."""
        self._kept = [(buffer.tensor, buffer.tensor.clone()) for buffer in self.averaged]

    def collect(self, fields: list[Tensor], weight: float | None, first: bool) -> list[bool]:
        """Writes the shard's buffers into the leaf, gives the model its own back, and tells which had changed.

        Float buffers count with `weight` (None: as they are), integers only from the first shard.
        """
        if not fields:
            return []
        values = [buffer.tensor.detach() for buffer in self.averaged]
        floats = [field for field, value in zip(fields, values, strict=True) if value.is_floating_point()]
        torch._foreach_copy_(fields, values)
        if weight is not None and floats:
            torch._foreach_mul_(floats, weight)
        if not first:
            for field, value in zip(fields, values, strict=True):
                if not value.is_floating_point():
                    field.zero_()
        return self.restore()

    def restore(self) -> list[bool]:
        """Gives the model back the buffers that were kept; tells which had changed."""
        tensors, values = [tensor for tensor, _ in self._kept], [value for _, value in self._kept]
        changed = differing(tensors, values)
        for index, (buffer, tensor) in enumerate(zip(self.averaged, tensors, strict=True)):
            if buffer.tensor is not tensor:
                buffer.module._buffers[buffer.key] = tensor
                changed[index] = True
        with torch.no_grad():
            for tensor, value, differs in zip(tensors, values, changed, strict=True):
                if differs:
                    tensor.copy_(value)
        return changed

    def apply(self, fields: list[Tensor], changed: list[bool]) -> None:
        """Writes the averaged values into those buffers that some shard changed."""
        with torch.no_grad():
            for buffer, field, differs in zip(self.averaged, fields, changed, strict=True):
                if differs:
                    buffer.tensor.copy_(field)
