"""Detects writes to parameters in a forward pass, which are refused if a batch has several shards.

Each shard makes a pass, so a momentum encoder, a clipped weight or `nn.Embedding(max_norm=)` is written as often as
a process has shards, and the bits would depend on the number of devices. The same holds for a network that a module
has in a list, where `model.modules()` does not find it, and for its buffers.
"""

import mmap
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.backends.torch.attributes import read_version
from lockstep.backends.torch.buffers import find_differing
from lockstep.backends.torch.script_changes import compute_checksum
from lockstep.errors import ExactError

DEPTH = 3  # of containers in containers that are searched for networks
_OWN = vars(nn.Module()).keys()


class _Place(NamedTuple):
    """A module's dict of parameters or buffers, with the name of the module."""

    path: str
    is_hidden: bool  # in a list, for example, and not a submodule
    module: nn.Module
    held: dict[str, Any]


class ParameterGuard:
    """Checks the parameters during one command: call `begin`, make the passes, then call `check`.

    The first training command compares values: the first forward pass with copies, from which `check` restores what a
    pass has written, and the rest by checksums, so that copies and gradients are not in memory at once. Later commands
    compare version counters and addresses. On a GPU neither is compared, because cuDNN moves the weights of recurrent
    layers.
    """

    def __init__(self, *roots: nn.Module) -> None:
        own = [each for root in roots for each in root.named_modules()]
        self._places = [_Place(path, False, module, module._parameters) for path, module in own]
        for path, module in _find_hidden(own):
            self._places += [_Place(path, True, module, held) for held in (module._parameters, module._buffers)]
        self._watched: Sequence[_Place] = ()
        self._keys: list[tuple[_Place, str]] = []
        self._tensors: list[Tensor] = []
        self._marks: list[tuple[int, int]] = []  # writes through `.data` are not counted, but move the address
        self._copies: list[Tensor] = []  # in the first training command, until a forward pass has written nothing
        self._checksums: list[int] = []  # in the first training command
        self._compared = False

    def begin(self, num_shards: int, training: bool) -> None:
        """Records the parameters before the first pass; none for a single shard, whose pass is that of a plain loop."""
        self._watched = self._places if num_shards > 1 else ()
        self._keys = [(each, key) for each in self._watched for key, value in each.held.items() if value is not None]
        self._tensors = self._read_tensors()
        self._marks = _read_marks(self._tensors)
        compared = self._tensors if training and not self._compared else []
        self._copies, self._checksums = list(map(_copy, compared)), list(map(compute_checksum, compared))

    def accept_pass(self) -> None:
        """Frees the copies if the first forward pass, which has ended, has written to no parameter."""
        if self._copies and not any(self._find_written()):
            self._copies = []

    def check(self) -> None:
        """Raises ExactError if a pass has written or replaced a parameter; restores it if there are copies."""
        now = self._read_tensors()
        same = len(now) == len(self._tensors) and all(map(is_, now, self._tensors))
        if same and not self._checksums and _read_marks(now) == self._marks:
            return
        found = [index for index, is_written in enumerate(self._find_written()) if is_written]
        copies, self._copies = self._copies, []
        self._compared = self._compared or bool(self._checksums)
        self._checksums = []
        for index in found:
            (place, key), tensor = self._keys[index], self._tensors[index]
            place.held[key] = tensor
            if copies:
                with torch.no_grad():
                    tensor.copy_(copies[index])
        if found:
            raise ExactError(_build_message(*self._keys[found[0]]))

    def _read_tensors(self) -> list[Tensor]:
        return [tensor for place in self._watched for tensor in place.held.values() if tensor is not None]

    def _find_written(self) -> list[bool]:
        pairs = list(zip(self._keys, self._tensors, strict=True))
        replaced = [place.held.get(key) is not tensor for (place, key), tensor in pairs]
        if self._copies:
            differs = find_differing(self._tensors, self._copies)
        elif self._checksums:
            sums = zip(self._tensors, self._checksums, strict=True)
            differs = [compute_checksum(tensor) != checksum for tensor, checksum in sums]
        else:
            marks = zip(self._tensors, _read_marks(self._tensors), self._marks, strict=True)
            differs = [tensor.device.type == "cpu" and now != before for tensor, now, before in marks]
        return [one or other for one, other in zip(replaced, differs, strict=True)]


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy; on a CPU in memory that is returned to the kernel when it is freed, which malloc would keep."""
    value = tensor.detach()
    if value.device.type != "cpu" or not value.numel():
        return value.clone()
    memory = mmap.mmap(-1, value.numel() * value.itemsize)
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape).copy_(value)


def _read_marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(read_version(tensor), tensor.data_ptr()) for tensor in tensors]


def _find_hidden(own: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for modules that are not submodules of `own` but are in their attributes and containers."""
    seen = {module for _, module in own}
    for path, module in own:
        for name, value in vars(module).items():
            for root in _find_modules(value, DEPTH) if name not in _OWN else ():
                for inner, each in root.named_modules():
                    if each not in seen:
                        seen.add(each)
                        yield ".".join(filter(None, (path, name, inner))), each


def _find_modules(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _find_modules(each, depth - 1)


def _build_message(place: _Place, key: str) -> str:
    name = f"{place.path}.{key}" if place.path else key
    max_norm = getattr(place.module, "max_norm", None)
    cause = "" if max_norm is None else f", by max_norm={max_norm}"
    first = "Make that module a submodule (self.name = module), and write" if place.is_hidden else "Write"
    return (
        "A forward pass must not write parameters: every shard makes one, so what passes write would depend on the "
        f"number of devices. Got {name!r} of {type(place.module).__name__}, written in a pass{cause}. {first} it "
        "between the steps, in the script, so that every replica gets it; or use shards=1, or "
        "lockstep.wrap(..., exact=False)."
    )
