"""Parameters that a forward pass writes, which is refused where a batch has several shards.

Each shard makes a pass, so a key encoder that follows by momentum, a clipped weight or `nn.Embedding(max_norm=)` is
written as often as a process has shards, and the bits would depend on the number of devices. The same holds for a
network that a module holds in a list, out of sight of `model.modules()`, and for its buffers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.backends.torch.attributes import version
from lockstep.backends.torch.buffers import differing
from lockstep.errors import ExactError

DEPTH = 3  # of containers in containers that are searched for networks
_OWN = vars(nn.Module()).keys()


class _Mark(NamedTuple):
    """A parameter in its place, and what tells that it was written."""

    path: str
    is_hidden: bool  # held in a list, say, and none of the model's submodules
    module: nn.Module
    held: dict[str, Any]  # the module's parameters or buffers
    key: str
    tensor: Tensor
    version: int  # not counted: writes through `.data`
    address: int


class ParameterGuard:
    """The parameters during one command: `keep` them, then `check` that no pass has written them.

    In the first training command their values are compared, afterwards the counts of writes and the addresses. These
    tell nothing on a GPU, where cuDNN moves the weights of recurrent layers.
    """

    def __init__(self, *roots: nn.Module) -> None:
        own = [each for root in roots for each in root.named_modules()]
        self._places = [(path, False, module, module._parameters) for path, module in own]
        for path, module in _find_hidden(own):
            self._places += [(path, True, module, held) for held in (module._parameters, module._buffers)]
        self._marks: list[_Mark] = []
        self._values: list[Tensor] = []  # copies, in the first training command
        self._compared = False

    def keep(self, num_shards: int, training: bool) -> None:
        """Notes the parameters before the first pass; of a single shard there is one pass, as in a plain loop."""
        self._marks = [
            _Mark(path, is_hidden, module, held, key, each, version(each), each.data_ptr())
            for path, is_hidden, module, held in (self._places if num_shards > 1 else ())
            for key, each in held.items()
            if each is not None
        ]
        compares = training and not self._compared
        self._values = [mark.tensor.detach().clone() for mark in self._marks] if compares else []

    def check(self) -> None:
        """Raises if a pass has written or replaced one; it has its value back if values were compared."""
        found = [index for index, is_written in enumerate(self._written()) if is_written]
        values, self._values = self._values, []
        self._compared = self._compared or bool(values)
        for index in found:
            mark = self._marks[index]
            mark.held[mark.key] = mark.tensor
            if values:
                with torch.no_grad():
                    mark.tensor.copy_(values[index])
        if found:
            raise ExactError(_explain(self._marks[found[0]]))

    def _written(self) -> list[bool]:
        replaced = [mark.held.get(mark.key) is not mark.tensor for mark in self._marks]
        if self._values:
            differs = differing([mark.tensor for mark in self._marks], self._values)
        else:
            differs = [
                mark.tensor.device.type == "cpu"
                and (version(mark.tensor), mark.tensor.data_ptr()) != (mark.version, mark.address)
                for mark in self._marks
            ]
        return [one or other for one, other in zip(replaced, differs, strict=True)]


def _find_hidden(own: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that these hold in attributes or containers, and that are none of them."""
    seen = {module for _, module in own}
    for path, module in own:
        for name, value in vars(module).items():
            for root in _modules_in(value, DEPTH) if name not in _OWN else ():
                for inner, each in root.named_modules():
                    if each not in seen:
                        seen.add(each)
                        yield ".".join(filter(None, (path, name, inner))), each


def _modules_in(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(each, depth - 1)


def _explain(mark: _Mark) -> str:
    name = f"{mark.path}.{mark.key}" if mark.path else mark.key
    max_norm = getattr(mark.module, "max_norm", None)
    cause = "" if max_norm is None else f", by max_norm={max_norm}"
    first = "Make that module a submodule (self.name = module), and write" if mark.is_hidden else "Write"
    return (
        "A forward pass leaves the parameters as they are: every shard makes one, so what passes write would depend on "
        f"the number of devices. Got {name!r} of {type(mark.module).__name__}, written in a pass{cause}. {first} it "
        "between the steps, in the script, from where it reaches every replica; or use shards=1, or "
        "lockstep.wrap(..., exact=False)."
    )
