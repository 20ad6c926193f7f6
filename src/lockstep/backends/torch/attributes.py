"""Attributes: the numbers and words in modules, which a script may turn between two steps.

A dropout's `p`, a batch norm's `momentum`, a module's mode. They travel to the
workers with the next step, and a checkpoint holds them by the modules' paths.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from lockstep.errors import StateError

LONGEST = 100  # of a list; a longer one is a record that somebody keeps
_PLAIN = {bool, int, float, str, type(None)}
_OWN = vars(nn.Module()).keys() - {"training"}


class Attributes:
    """Those of every module of a model and of its loss."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        named = [("", model), ("loss:", loss)]
        self._modules = {prefix + path: module for prefix, root in named for path, module in root.named_modules()}
        self._known = [set(_plain(module)) for module in self._modules.values()]

    def read(self) -> list[tuple[dict[str, Any], list[str]]]:
        """For each module its numbers and words, and the names of those that were deleted since they were seen."""
        found = []
        for module, known in zip(self._modules.values(), self._known, strict=True):
            plain = _plain(module)
            known |= plain.keys()
            found.append((plain, sorted(known - vars(module).keys())))
        return found

    def write(self, attributes: list[tuple[dict[str, Any], list[str]]]) -> None:
        """Takes over what another process has read."""
        for module, (plain, gone) in zip(self._modules.values(), attributes, strict=True):
            vars(module).update(plain)
            for name in gone:
                vars(module).pop(name, None)

    def saved(self) -> dict[str, dict[str, Any]]:
        """The same by the modules' paths, less what torch keeps for itself."""
        found = {path: _plain(module) for path, module in self._modules.items()}
        return {
            path: {name: value for name, value in plain.items() if name not in _OWN} for path, plain in found.items()
        }

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over what was saved; what has no plain value in its place now is refused, before anything is written."""
        saved = {path: plain for path, plain in saved.items() if plain}
        for path, plain in saved.items():
            if path not in self._modules:
                raise StateError(
                    f"The checkpoint does not fit this model. It has {plain!r} for a module {path!r}, the model no such "
                    "module. Use the model it was saved with."
                )
            for name, value in plain.items():
                there = vars(self._modules[path]).get(name)
                if value is not None and not is_plain(there):  # in the place of None there may be what a pass keeps
                    raise StateError(
                        f"The checkpoint does not fit this model. At {path!r} it has {name}={value!r}, the model a "
                        f"{type(there).__name__}. Use the model it was saved with."
                    )
        one_mode = _in_one_mode(self.saved()) and _in_one_mode(saved)  # then the next step's own is right
        for path, plain in saved.items():
            own = vars(self._modules[path])
            for name, value in plain.items():
                if is_plain(own.get(name)) and not (one_mode and name == "training"):
                    own[name] = value


def is_plain(value: Any) -> bool:
    """Whether it is a number or a word, Python's or numpy's, or a short list of such.

    >>> is_plain(0.5), is_plain(np.float64(0.5)), is_plain((1, [2.0])), is_plain(object())
    (True, True, True, False)
    """
    if type(value) in (list, tuple):
        return len(value) <= LONGEST and all(map(is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.number | np.bool_)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if is_plain(value)}


def _in_one_mode(saved: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the model's modules are all in training mode, or all in evaluation mode."""
    return len({plain.get("training") for path, plain in saved.items() if not path.startswith("loss:")}) < 2
