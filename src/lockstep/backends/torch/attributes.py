"""The plain attributes of modules, which the script may change between two steps.

Examples are a dropout's `p`, a batch norm's `momentum` and a module's mode. They are sent to the workers with the
next step, and a checkpoint has them under the modules' paths.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.torch import state_arrays
from lockstep.core.types import Array
from lockstep.errors import StateError

LONGEST = 100  # entries of a list; a longer one is a log rather than a setting
_PLAIN = {bool, int, float, str, type(None)}
_CONTAINERS = {dict, OrderedDict, set}  # most attributes of a module, all of which are read before each step
_NO_TENSORS = _PLAIN | _CONTAINERS
_OWN = vars(nn.Module()).keys() - {"training"}


class ModuleValues(NamedTuple):
    """The attributes of one module that are sent to the workers."""

    plain: dict[str, Any]
    deleted: list[str]  # existed once and were deleted
    tensors: dict[str, tuple[Array, bool]]  # set by the script, and whether each is on the CPU


class ModuleAttributes:
    """The attributes of every module of a model and of its loss.

    A tensor that is neither parameter nor buffer is sent to the workers if the script has set it or written to it. A
    tensor that a forward pass has set stays in its process.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        named = [("", model), ("loss:", loss)]
        self._modules = {prefix + path: module for prefix, root in named for path, module in root.named_modules()}
        self._known = {path: set(_read_plain(module)) for path, module in self._modules.items()}
        self._carried: set[tuple[str, str]] = set()
        self._seen: dict[tuple[str, str], tuple[Tensor, int]] = {}
        self.accept_tensors()

    def accept_tensors(self) -> None:
        """Records the tensors that are in attributes now as written by a pass, not by the script."""
        self._seen = {place: (value, read_version(value)) for place, value in self._find_tensors().items()}

    def read(self) -> list[ModuleValues]:
        """Returns the attributes of each module, to be sent to the workers."""
        tensors = self._find_tensors()
        for place, value in tensors.items():
            seen, counted = self._seen.get(place, (None, 0))
            if seen is not value or counted != read_version(value):
                self._carried.add(place)
        self._carried &= tensors.keys()
        found = []
        for path, module in self._modules.items():
            plain, known = _read_plain(module), self._known[path]
            known |= plain.keys()
            carried = {name: tensors[where, name] for where, name in sorted(self._carried) if where == path}
            packed = {
                name: (state_arrays.to_array(value), value.device.type == "cpu") for name, value in carried.items()
            }
            found.append(ModuleValues(plain, sorted(known - vars(module).keys()), packed))
        return found

    def write(self, values: list[ModuleValues], device: torch.device) -> None:
        """Writes the attributes that `read` returned in the script's process, with tensors on this device."""
        for module, (plain, deleted, tensors) in zip(self._modules.values(), values, strict=True):
            own = vars(module)
            own.update(plain)
            for name, (array, on_cpu) in tensors.items():
                own[name] = state_arrays.to_tensor(array).to("cpu" if on_cpu else device)
            for name in deleted:
                own.pop(name, None)

    def _find_tensors(self) -> dict[tuple[str, str], Tensor]:
        """Returns the tensors in attributes by (module's path, attribute), without those that need a gradient.

        Tensors that need a gradient come from a forward pass.
        """
        return {
            (path, name): value
            for path, module in self._modules.items()
            for name, value in vars(module).items()
            if type(value) not in _NO_TENSORS and isinstance(value, Tensor) and not value.requires_grad
        }

    def read_plain(self) -> dict[str, dict[str, Any]]:
        """Returns {module's path: {attribute: plain value}}, without the attributes of torch's base class."""
        found = {path: _read_plain(module) for path, module in self._modules.items()}
        return {
            path: {name: value for name, value in plain.items() if name not in _OWN} for path, plain in found.items()
        }

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes what `read_plain` returned; raises StateError, and writes nothing, if it does not fit the model."""
        saved = {path: plain for path, plain in saved.items() if plain}
        for path, plain in saved.items():
            if path not in self._modules:
                raise StateError(
                    f"The checkpoint does not fit this model. It has attributes {plain!r} of a module {path!r}, which "
                    "this model does not have. Use the model that was saved."
                )
            for name, value in plain.items():
                there = vars(self._modules[path]).get(name)
                filled = value is None or self._was_plain(path, name)  # by a pass
                if not filled and not is_plain(there):
                    raise StateError(
                        f"The checkpoint does not fit this model. The attribute {f'{path}.{name}'.lstrip('.')!r} is "
                        f"{value!r} in the checkpoint and a {type(there).__name__} in the model. Use the model that "
                        "was saved."
                    )
            check_shadowing(plain, self._modules[path])
        # A checkpoint of an ordinary training has every module in training mode. It does not change a model that the
        # script has put into evaluation mode for use.
        stays = _read_modes(self.read_plain()) == {False} and _read_modes(saved) == {True}
        for path, plain in saved.items():
            own = vars(self._modules[path])
            for name, value in plain.items():
                replaced = value is not None and self._was_plain(path, name)
                if (replaced or is_plain(own.get(name))) and not (stays and name == "training"):
                    own[name] = value

    def _was_plain(self, path: str, name: str) -> bool:
        """Returns whether a pass or the script has replaced a plain value by a tensor."""
        return name in self._known[path] and isinstance(vars(self._modules[path]).get(name), Tensor)


def check_shadowing(saved: Mapping[str, Any], owner: Any) -> None:
    """Raises StateError if a saved value would hide a method or attribute of the class of a module or optimizer."""
    for name in saved:
        if name not in vars(owner) and hasattr(type(owner), name):
            raise StateError(
                f"The checkpoint does not fit {type(owner).__name__}. It has a value for {name!r}, a method or "
                "attribute of the class. Use another checkpoint."
            )


def is_plain(value: Any) -> bool:
    """Returns whether this is a number, a string or None, Python's or numpy's, or a short list or tuple of them.

    >>> is_plain(0.5), is_plain(np.float64(0.5)), is_plain((1, [2.0])), is_plain(object())
    (True, True, True, False)
    """
    if type(value) in (list, tuple):
        return len(value) <= LONGEST and all(map(is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


def read_version(tensor: Tensor) -> int:
    """Returns how often the tensor was written; 0 for an inference tensor, for which torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _read_plain(module: nn.Module) -> dict[str, Any]:
    found = [(name, value) for name, value in vars(module).items() if type(value) not in _CONTAINERS]
    return {name: value for name, value in found if type(value) in _PLAIN or is_plain(value)}


def _read_modes(saved: Mapping[str, Mapping[str, Any]]) -> set[Any]:
    """Returns the set of the modules' modes: {True} if all are in training mode, {True, False} if they differ."""
    return {plain["training"] for path, plain in saved.items() if "training" in plain and not path.startswith("loss:")}
