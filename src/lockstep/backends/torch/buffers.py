"""The model's buffers: running statistics and counters, equal at the start of every shard and averaged over the shards.

A shard's forward pass writes to the model's buffers. Their values are copied into the shard's partial sum, and the
buffers get their old values back, so that the next shard starts from the same values.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.backends.torch.flat_vectors import LeafArrays
from lockstep.errors import ModelError

_read_form = attrgetter("shape", "dtype", "device")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffer(NamedTuple):
    """A buffer of a module, by its key, because the module may replace the tensor."""

    name: str
    module: nn.Module
    key: str

    @property
    def state_name(self) -> str:
        """The buffer's name in the state: `model.NAME`, or `buffers.NAME` if it is not persistent."""
        hidden = self.key in self.module._non_persistent_buffers_set
        return f"{'buffers' if hidden else 'model'}.{self.name}"

    @property
    def tensor(self) -> Tensor:
        """The tensor that the module has as this buffer now."""
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor


def find_buffers(model: nn.Module) -> list[Buffer]:
    """Returns every buffer of the model, persistent or not."""
    return [
        Buffer(f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key, tensor in module._buffers.items()
        if tensor is not None
    ]


def find_loss_buffers(loss: Any) -> list[Buffer]:
    """Returns the buffers that a loss may write to; those of torch's own losses (class weights) are constants."""
    found = find_buffers(loss) if isinstance(loss, nn.Module) else []
    return [buffer._replace(name=f"loss.{buffer.name}") for buffer in found if may_write_buffers(buffer.module)]


def may_write_buffers(module: nn.Module) -> bool:
    """Returns whether a loss's module may write to its buffers."""
    return not type(module).forward.__module__.startswith("torch.nn.modules.loss")


def find_differing(ones: list[Tensor], others: list[Tensor]) -> list[bool]:
    """Returns for each pair whether the bytes differ; waits for a GPU once, not for each pair.

    Version counters do not show every write: torch's batch norm writes its statistics without counting.
    """
    pairs = [(_view_bits(one), _view_bits(other)) for one, other in zip(ones, others, strict=True)]
    if all(one.is_cpu for one, _ in pairs):
        return [not torch.equal(one, other) for one, other in pairs]
    flags = [(one != other).any() for one, other in pairs]
    found: list[bool] = torch.stack(flags).tolist() if flags else []
    return found


def _view_bits(tensor: Tensor) -> Tensor:
    """Returns a float tensor viewed as integers, which are equal only if the bytes are; any other tensor as it is."""
    return tensor.detach().view(_INTEGERS[tensor.itemsize]) if tensor.is_floating_point() else tensor


class BufferAverages:
    """Averages the buffers over a step's shards: `save` them, `collect` each shard's, `apply` the averages.

    Complex buffers are constants, such as rotary frequencies, and are left alone.
    """

    def __init__(self, buffers: list[Buffer], modules: Iterable[nn.Module]) -> None:
        places = {(id(buffer.module), buffer.key): buffer for buffer in buffers}  # a loss may hold the model's layers
        self.averaged = [buffer for buffer in places.values() if not buffer.tensor.is_complex()]
        self._integers = [index for index, each in enumerate(self.averaged) if not each.tensor.is_floating_point()]
        self._modules = list(dict.fromkeys(modules))
        self._known = places.keys()
        self._places = [place for place, buffer in places.items() if not buffer.tensor.is_complex()]
        self._tensors: list[Tensor] = []  # the buffers that are averaged
        self._forms: list[tuple[Any, ...]] = []
        self._values: list[Tensor] = []  # their values before the step, in memory that is used again
        self._bits: list[Tensor] = []  # the same memory as integers
        self._registered: list[tuple[nn.Module, list[str], list[Tensor | None]]] = []
        self._without: dict[nn.Module, dict[str, Tensor | None]] = {}  # modules without buffers: where one would be
        self._changed: list[bool] = []  # which of them a pass has changed since they were saved

    def save(self) -> None:
        """Saves the buffers as they are before the step."""
        self._tensors = tensors = [buffer.tensor for buffer in self.averaged]
        forms = list(map(_read_form, tensors))
        if forms != self._forms:
            self._forms = forms
            self._values = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
            self._bits = list(map(_view_bits, self._values))
        if tensors:
            torch._foreach_copy_(self._values, _detach(tensors))
        held = [(module, module._buffers) for module in self._modules]
        self._registered = [(module, list(own), list(own.values())) for module, own in held if own]
        self._without = {module: own for module, own in held if not own}
        self._changed = [False] * len(tensors)

    def allocate(self) -> list[Tensor]:
        """Returns an uninitialized tensor with the shape and dtype of each buffer."""
        return list(map(torch.empty_like, self._values))

    def collect(self, arrays: LeafArrays, weight: float | None, first: bool) -> list[bool]:
        """Copies the buffers into the shard's `arrays`, then resets the buffers to their values before the step.

        Returns a list that says of each averaged buffer whether this step has changed it.
        Float buffers are multiplied by `weight` (None: taken as they are); integers are taken from the first shard
        only.
        """
        replaced = self._find_replaced()
        tensors = self._tensors
        if replaced:
            self._check_new(replaced)
            tensors = self._check_forms([buffer.module._buffers.get(buffer.key) for buffer in self.averaged])
        elif list(map(_read_form, tensors)) != self._forms:
            self._check_forms(tensors)
        if tensors:
            tensors = _detach(tensors)
            torch._foreach_copy_(arrays.buffers, tensors)
            if weight is not None:
                for vector in arrays.averaged:
                    vector.mul_(weight)
            if not first:
                for index in self._integers:
                    arrays.buffers[index].zero_()
            if weight is None and all(map(_is_writable, tensors)):  # to write the same values again changes nothing
                self._changed = [True] * len(tensors)
            if not replaced and all(self._changed):
                torch._foreach_copy_(tensors, self._values)
                return self._changed
        return self._restore(replaced)

    def restore(self) -> list[bool]:
        """Restores the saved buffers; returns for each of them whether a pass has changed it since `save`."""
        return self._restore(self._find_replaced())

    def _find_replaced(self) -> list[tuple[nn.Module, dict[str, Tensor | None]]]:
        """Returns (module, its saved buffers) for each module that now has other tensors as buffers."""
        found: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        for module, keys, tensors in self._registered:
            now = module._buffers
            if list(now) != keys or not all(map(is_, now.values(), tensors)):
                found.append((module, dict(zip(keys, tensors, strict=True))))
        if any(self._without.values()):
            found += [(module, {}) for module, now in self._without.items() if now]
        return found

    def _check_new(self, replaced: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
        """Raises ModelError for a new buffer, for which neither the partial sum nor the state has a place."""
        for module, _ in replaced:
            for key, tensor in module._buffers.items():
                if tensor is not None and (id(module), key) not in self._known:
                    raise ModelError(
                        f"A forward pass has added the buffer {key!r} of shape {tuple(tensor.shape)} to "
                        f"{type(module).__name__}, but all buffers must exist in lockstep.wrap. Create it before, at "
                        "its full size; a tensor computed from the inputs alone needs no buffer."
                    )

    def _check_forms(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Returns the tensors; raises ModelError if one is missing or no longer has its saved shape and dtype."""
        found = []
        for index, (tensor, before) in enumerate(zip(tensors, self._values, strict=True)):
            if tensor is None or tensor.shape != before.shape or tensor.dtype != before.dtype:
                raise ModelError(
                    f"The buffer {self.averaged[index].name!r} was {_describe(before)} before a forward pass and is "
                    f"{_describe(tensor)} after it, but its shape and type must not change. Create it before "
                    "lockstep.wrap, at its full size, and write to it in place."
                )
            found.append(tensor)
        return found

    def _restore(self, replaced: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> list[bool]:
        places = self._put_back(replaced) if replaced else ()
        tensors, values, changed = self._tensors, self._values, self._changed
        if list(map(_read_form, tensors)) != self._forms:
            for tensor, value in zip(tensors, values, strict=True):
                if tensor.shape != value.shape:  # resized in place
                    tensor.data = torch.zeros_like(value)
        if not all(changed):  # one that is known to have changed is restored without being compared again
            rest = [index for index, differs in enumerate(changed) if not differs]
            differ = find_differing([tensors[index] for index in rest], [self._bits[index] for index in rest])
            for index, differs in zip(rest, differ, strict=True):
                changed[index] = differs or self._places[index] in places
        if changed and all(changed):
            torch._foreach_copy_(_detach(tensors), values)
        elif any(changed):
            torch._foreach_copy_(_detach(compress(tensors, changed)), list(compress(values, changed)))
        return changed

    def _put_back(self, replaced: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> set[tuple[int, str]]:
        """Puts the saved tensors back into their modules.

        Returns the (module id, key) pairs of those that a pass had replaced.
        """
        found = set()
        for module, before in replaced:
            now = module._buffers
            found |= {(id(module), key) for key in before if now.get(key) is not before[key]}
            now.clear()
            now.update(before)
        return found

    def apply(self, fields: list[Tensor], changed: Sequence[float]) -> None:
        """Writes the averages in `fields` into the buffers for which `changed` is not 0."""
        if any(changed):
            tensors = [buffer.tensor for buffer in compress(self.averaged, changed)]
            torch._foreach_copy_(_detach(tensors), list(compress(fields, changed)))


def _is_writable(tensor: Tensor) -> bool:
    """Returns whether the tensor can be written to as a whole; False if some of its elements share memory."""
    return tensor.is_contiguous() and not tensor.is_inference()


def _detach(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors, detached from autograd where they need a gradient."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def _describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
