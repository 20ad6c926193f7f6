"""Detects what the script has changed between two steps, by comparison with what was recorded.

Before each step that follows code of the script, `SavedSettings` compares the attributes of all modules, the parameter
groups and the flags, and `SavedState` the tensors. Values are read in full and sent only if something differs. See
docs/design/what-workers-have.md.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch.attributes import LONGEST, is_plain, read_version
from lockstep.backends.torch.unsupported import count_hooks

SMALL = 2**16  # bytes of a tensor that is copied beside others, because a call for each would cost more
_read_counter = attrgetter("_version")
_read_held = attrgetter("_parameters", "_buffers")
_read_trained = attrgetter("requires_grad")
_read_type = attrgetter("dtype")


class SavedSettings:
    """What decides how a step is made, besides the state: attributes, hyperparameters, frozen flags, hooks.

    Values are compared by identity, so that no `__eq__` of the script is called, and lists by their entries.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], optimizer: Any) -> None:
        self._modules = modules
        self._parameters = parameters
        self._optimizer = optimizer
        self._dicts: list[dict[Any, Any]] = []
        self._empty: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._logs: list[list[Any]] = []  # lists too long for a setting
        self._tensors: list[Tensor] = []
        self._keys: list[Any] | None = None
        self._values: list[Any] = []
        self._marks: list[Any] = []

    def has_changed(self) -> bool:
        """Returns whether anything may differ from what it was when `accept` was called; True before that."""
        return not (
            self._keys == list(chain.from_iterable(self._dicts))
            and self._marks == self._read_marks()
            and all(map(is_, self._values, self._iterate_values()))
        )

    def accept(self) -> None:
        """Records the present values."""
        groups = self._optimizer.param_groups
        own = [(vars(each), each._parameters, each._modules) for each in self._modules]
        self._dicts = [*(each for held in own for each in held if each), *groups, vars(self._optimizer)]
        self._empty = [each for held in own for each in held if not each]
        values = list(chain.from_iterable(each.values() for each in self._dicts))
        attributes = chain(map(vars, self._modules), groups, [vars(self._optimizer)])  # an update writes parameters
        self._lists = [groups, *(group["params"] for group in groups), *chain.from_iterable(map(_find_lists, values))]
        self._logs = [value for value in values if type(value) is list and len(value) > LONGEST]
        self._tensors = [value for own in attributes for value in own.values() if isinstance(value, Tensor)]
        self._keys, self._values, self._marks = (
            list(chain.from_iterable(self._dicts)),
            list(self._iterate_values()),
            self._read_marks(),
        )
        if not all(is_plain(value) for group in groups for key, value in group.items() if key != "params"):
            self._keys = None  # a rate that is a tensor, for example: read in full before each step

    def _iterate_values(self) -> Iterable[Any]:
        return chain(chain.from_iterable(map(dict.values, self._dicts)), chain.from_iterable(self._lists))

    def _read_marks(self) -> list[Any]:
        parameters = self._parameters
        return [
            any(self._empty),
            any(len(each) <= LONGEST for each in self._logs),
            list(map(len, self._lists)),
            len(self._optimizer.state),
            list(map(_read_trained, parameters)),
            list(map(_read_type, parameters)),
            list(map(Tensor.stride, parameters)),
            list(map(read_version, self._tensors)),
            count_hooks(self._optimizer, parameters),
        ]


def _find_lists(value: Any) -> list[list[Any]]:
    """Returns a list and all lists in it, also in tuples: the script may replace their entries."""
    if type(value) not in (list, tuple) or not is_plain(value):
        return [value] if type(value) is list and len(value) <= LONGEST else []
    inner = [found for each in value for found in _find_lists(each)]
    return [value, *inner] if isinstance(value, list) else inner


class SavedState:
    """Detects writes to the state by its tensors' identities, version counters, addresses and (on a CPU) checksums.

    Writes by batch norm, through `.data` and through numpy change no counter. On a GPU such writes are not found,
    because every step would wait for the checksums.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: Any) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._sums = ByteSums()
        self._values: list[Any] = []  # of the modules and of the optimizer state, some of them no tensors
        self._own: list[Tensor] = []  # the modules'
        self._tensors: list[Tensor] = []  # all
        self._marks: list[Any] = []

    def has_changed(self) -> bool:
        """Returns whether anything was written since the last call; False the first time."""
        marks = self._marks
        replaced = self._read()
        return bool(marks) and (replaced or marks != self._marks)

    def accept(self) -> None:
        """Records the present state, which Lockstep itself has written; does nothing before the first `has_changed`."""
        if self._marks:
            self._read()

    def _read(self) -> bool:
        """Reads the marks that `has_changed` compares; returns whether there are other tensors than before."""
        held = list(chain.from_iterable(map(dict.values, chain.from_iterable(map(_read_held, self._modules)))))
        state = chain.from_iterable(own.values() for own in self._optimizer.state.values() if isinstance(own, dict))
        values = [*held, *state]
        replaced = len(values) != len(self._values) or not all(map(is_, values, self._values))
        if replaced:
            self._values = values
            self._own = [value for value in held if value is not None]
            self._tensors = [value for value in values if isinstance(value, Tensor)]
        addresses = list(map(Tensor.data_ptr, self._tensors))
        sums = self._sums.read(self._own, addresses[: len(self._own)])
        self._marks = [addresses, list(map(_read_counter, self._tensors)), sums]
        return replaced


class ByteSums:
    """Computes checksums of CPU tensors: sums of their bytes as integers. Sums small tensors of a size at once."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._groups: list[list[Tensor]] = []  # views as integers, made once
        self._scattered: list[Tensor] = []  # tensors that are not contiguous

    def read(self, tensors: list[Tensor], addresses: list[int]) -> list[Any]:
        """Returns the checksums of the tensors; `addresses` shows whether their memory has been replaced."""
        if addresses != self._addresses or not all(map(is_, tensors, self._tensors)):
            self._tensors, self._addresses = tensors, addresses
            self._find_views()
        return [list(map(_sum_each, self._groups)), list(map(compute_checksum, self._scattered))]

    def _find_views(self) -> None:
        own = [each for each in self._tensors if each.device.type == "cpu" and each.numel()]
        self._scattered = [each for each in own if not each.is_contiguous()]
        groups: dict[Any, list[Tensor]] = {}
        for index, view in enumerate(_view_integers(each) for each in own if each.is_contiguous()):
            alone = index if view.nbytes > SMALL else None
            groups.setdefault((view.dtype, len(view), alone), []).append(view)
        self._groups = list(groups.values())


def _sum_each(views: list[Tensor]) -> Any:
    return views[0].sum().item() if len(views) == 1 else torch.cat(views).view(len(views), -1).sum(1).tolist()


def compute_checksum(tensor: Tensor) -> int:
    """Returns the sum of a CPU tensor's bytes as integers; on a GPU it is 0, because every step would wait for it."""
    if tensor.device.type != "cpu":
        return 0
    return int(_view_integers(tensor.detach().resolve_conj().resolve_neg().contiguous()).sum())


def _view_integers(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat if len(flat) % 8 or flat.storage_offset() % 8 else flat.view(torch.int64)
