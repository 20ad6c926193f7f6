"""Attributes: the numbers and words in modules, which a script may turn between two steps.

A dropout's `p`, a batch norm's `momentum`, a module's mode. They travel to the
workers with the next step, and a checkpoint holds them by the modules' paths.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.base import Array
from lockstep.backends.torch import state_arrays
from lockstep.errors import StateError

LONGEST = 100  # of a list; a longer one is a record that somebody keeps
_PLAIN = {bool, int, float, str, type(None)}
_NESTS = {dict, OrderedDict, set}  # most of what a module holds, and this is looked at before each step
_NO_TENSORS = _PLAIN | _NESTS
_OWN = vars(nn.Module()).keys() - {"training"}


class Told(NamedTuple):
    """What one module's attributes are in the script's process."""

    plain: dict[str, Any]
    gone: list[str]  # were seen once, and were deleted
    tensors: dict[str, tuple[Array, bool]]  # were put there by the script; and whether they lie on the CPU


class Attributes:
    """Those of every module of a model and of its loss.

    A tensor that is neither parameter nor buffer is carried where the script has written it;
    what a forward pass leaves there stays in its process.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        named = [("", model), ("loss:", loss)]
        self._modules = {prefix + path: module for prefix, root in named for path, module in root.named_modules()}
        self._known = {path: set(_plain(module)) for path, module in self._modules.items()}
        self._carried: set[tuple[str, str]] = set()
        self._seen: dict[tuple[str, str], tuple[Tensor, int]] = {}
        self.look()

    def look(self) -> None:
        """Takes the tensors that are there now for no work of the script's."""
        self._seen = {place: (value, version(value)) for place, value in self._tensors().items()}

    def read(self) -> list[Told]:
        """What the workers are to be told of each module."""
        tensors = self._tensors()
        for place, value in tensors.items():
            seen, counted = self._seen.get(place, (None, 0))
            if seen is not value or counted != version(value):
                self._carried.add(place)
        self._carried &= tensors.keys()
        found = []
        for path, module in self._modules.items():
            plain, known = _plain(module), self._known[path]
            known |= plain.keys()
            carried = {name: tensors[where, name] for where, name in sorted(self._carried) if where == path}
            packed = {
                name: (state_arrays.to_array(value), value.device.type == "cpu") for name, value in carried.items()
            }
            found.append(Told(plain, sorted(known - vars(module).keys()), packed))
        return found

    def write(self, told: list[Told], device: torch.device) -> None:
        """Takes over what another process has read."""
        for module, (plain, gone, tensors) in zip(self._modules.values(), told, strict=True):
            own = vars(module)
            own.update(plain)
            for name, (array, on_cpu) in tensors.items():
                own[name] = state_arrays.to_tensor(array).to("cpu" if on_cpu else device)
            for name in gone:
                own.pop(name, None)

    def _tensors(self) -> dict[tuple[str, str], Tensor]:
        """By place; what has a history comes from a forward pass."""
        return {
            (path, name): value
            for path, module in self._modules.items()
            for name, value in vars(module).items()
            if type(value) not in _NO_TENSORS and isinstance(value, Tensor) and not value.requires_grad
        }

    def saved(self) -> dict[str, dict[str, Any]]:
        """The same by the modules' paths, less what torch keeps for itself."""
        found = {path: _plain(module) for path, module in self._modules.items()}
        return {
            path: {name: value for name, value in plain.items() if name not in _OWN} for path, plain in found.items()
        }

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over what was saved; one that has no plain value to replace is refused, before anything is written."""
        saved = {path: plain for path, plain in saved.items() if plain}
        for path, plain in saved.items():
            if path not in self._modules:
                raise StateError(
                    f"The checkpoint does not fit this model. It has {plain!r} for a module {path!r}, the model no "
                    "such module. Use the model it was saved with."
                )
            for name, value in plain.items():
                there = vars(self._modules[path]).get(name)
                filled = value is None or self._was_plain(path, name)  # by a pass
                if not filled and not is_plain(there):
                    raise StateError(
                        f"The checkpoint does not fit this model. At {path!r} it has {name}={value!r}, the model a "
                        f"{type(there).__name__}. Use the model it was saved with."
                    )
            check_new(plain, self._modules[path])
        # A model put into evaluation mode to be used is not turned back by the checkpoint of an ordinary training.
        stays = _modes(self.saved()) == {False} and _modes(saved) == {True}
        for path, plain in saved.items():
            own = vars(self._modules[path])
            for name, value in plain.items():
                replaced = value is not None and self._was_plain(path, name)
                if (replaced or is_plain(own.get(name))) and not (stays and name == "training"):
                    own[name] = value

    def _was_plain(self, path: str, name: str) -> bool:
        """Whether a pass, or the script, has put a tensor in the place of a number."""
        return name in self._known[path] and isinstance(vars(self._modules[path]).get(name), Tensor)


def check_new(saved: Mapping[str, Any], holder: Any) -> None:
    """Refuses values that would hide what the class of a module or of an optimizer has under the same name."""
    for name in saved:
        if name not in vars(holder) and hasattr(type(holder), name):
            raise StateError(
                f"The checkpoint does not fit {type(holder).__name__}. It has {name!r}, which is a method or a value "
                "of the class. Use another checkpoint."
            )


def is_plain(value: Any) -> bool:
    """Whether it is a number or a word, Python's or numpy's, or a short list of such.

    >>> is_plain(0.5), is_plain(np.float64(0.5)), is_plain((1, [2.0])), is_plain(object())
    (True, True, True, False)
    """
    if type(value) in (list, tuple):
        return len(value) <= LONGEST and all(map(is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


def version(tensor: Tensor) -> int:
    """How often it was written; torch does not count for those that were made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _plain(module: nn.Module) -> dict[str, Any]:
    found = [(name, value) for name, value in vars(module).items() if type(value) not in _NESTS]
    return {name: value for name, value in found if type(value) in _PLAIN or is_plain(value)}


def _modes(saved: Mapping[str, Mapping[str, Any]]) -> set[Any]:
    """The modes of the model's modules: {True} if all of them are in training mode."""
    return {plain["training"] for path, plain in saved.items() if "training" in plain and not path.startswith("loss:")}
