"""Buffers: running statistics and counters, the same for every shard and averaged by the tree.

A shard's forward pass writes to the model's buffers. Its result goes into the leaf
and the model gets back what it had, so that the next shard starts from the same.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ModelError

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def of_loss(loss: Any) -> list[Buffer]:
    """The buffers that a loss may write to; those of torch's own are constants, which the script may replace."""
    found = of(loss) if isinstance(loss, nn.Module) else []
    return [buffer._replace(name=f"loss.{buffer.name}") for buffer in found if writes(buffer.module)]


def writes(module: nn.Module) -> bool:
    """Whether a loss's module may write to its buffers."""
    return not type(module).forward.__module__.startswith("torch.nn.modules.loss")


def differing(ones: list[Tensor], others: list[Tensor]) -> list[bool]:
    """For each pair whether the bytes differ; a GPU is waited for once, not once for each.

    Version counters do not tell: torch's batch norm writes its statistics behind their back.
    """
    pairs = [(_raw(one), _raw(other)) for one, other in zip(ones, others, strict=True)]
    if all(one.device.type == "cpu" for one, _ in pairs):
        return [not torch.equal(one, other) for one, other in pairs]
    flags = [(one != other).any() for one, other in pairs]
    found: list[bool] = torch.stack(flags).tolist() if flags else []
    return found


def _raw(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers, of which equal ones have equal bytes."""
    return tensor.detach().view(_WHOLE[tensor.itemsize]) if tensor.is_floating_point() else tensor


class Statistics:
    """The buffers during one step: `keep` them, `collect` each shard's, `restore` what they were.

    Complex buffers are constants such as rotary frequencies and are left alone.
    """

    def __init__(self, buffers: list[Buffer], modules: Iterable[nn.Module]) -> None:
        places = {(id(buffer.module), buffer.key): buffer for buffer in buffers}  # a loss may hold the model's layers
        self.averaged = [buffer for buffer in places.values() if not buffer.tensor.is_complex()]
        self._modules = list(dict.fromkeys(modules))
        self._known = places.keys()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._there: list[dict[str, Tensor | None]] = []

    def keep(self) -> None:
        """Remembers the buffers as they are before the step."""
        self._kept = [(buffer.tensor, buffer.tensor.clone()) for buffer in self.averaged]
        self._there = [dict(module._buffers) for module in self._modules]

    def collect(self, fields: list[Tensor], weight: float | None, first: bool) -> list[bool]:
        """Writes the shard's buffers into the leaf, gives the model its own back, and tells which had changed.

        Float buffers count with `weight` (None: as they are), integers only from the first shard.
        """
        self._check()
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

    def _check(self) -> None:
        """Refuses buffers that are not those of the beginning: nothing else is in the leaf, nor in the state."""
        for module in self._modules:
            for key, tensor in module._buffers.items():
                if tensor is not None and (id(module), key) not in self._known:
                    raise ModelError(
                        f"A model keeps the buffers it was wrapped with. Got a new one, {key!r} of "
                        f"{type(module).__name__}, of shape {tuple(tensor.shape)}. Make it before lockstep.wrap, at "
                        "its full size; what follows from the inputs alone needs no buffer."
                    )
        for buffer, (_, before) in zip(self.averaged, self._kept, strict=True):
            tensor = buffer.module._buffers.get(buffer.key)
            if tensor is None or (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
                raise ModelError(
                    f"A buffer keeps its shape and type. {buffer.name!r} was {_form(before)} before a shard and is "
                    f"{_form(tensor)} after it. Make it before lockstep.wrap, at its full size, and write to it in "
                    "place."
                )

    def restore(self) -> list[bool]:
        """Gives the model back the buffers that were kept; tells which had changed."""
        replaced = self._replaced()
        tensors, values = [tensor for tensor, _ in self._kept], [value for _, value in self._kept]
        for tensor, value in self._kept:
            if tensor.shape != value.shape:  # resized in place
                tensor.data = torch.zeros_like(value)
        changed = differing(tensors, values)
        with torch.no_grad():
            for tensor, value, differs in zip(tensors, values, changed, strict=True):
                if differs:
                    tensor.copy_(value)
        places = [(id(buffer.module), buffer.key) for buffer in self.averaged]
        return [differs or place in replaced for differs, place in zip(changed, places, strict=True)]

    def _replaced(self) -> set[tuple[int, str]]:
        """Puts every tensor back in its place; tells in which another had been."""
        found = set()
        for module, before in zip(self._modules, self._there, strict=True):
            now = module._buffers
            if now.keys() == before.keys() and all(now[key] is before[key] for key in now):
                continue
            found |= {(id(module), key) for key in before if now.get(key) is not before[key]}
            now.clear()
            now.update(before)
        return found

    def apply(self, fields: list[Tensor], changed: list[bool]) -> None:
        """Writes the averaged values into those buffers that some shard changed."""
        with torch.no_grad():
            for buffer, field, differs in zip(self.averaged, fields, changed, strict=True):
                if differs:
                    buffer.tensor.copy_(field)


def _form(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
