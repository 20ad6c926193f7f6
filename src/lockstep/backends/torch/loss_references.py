"""Detects changes to objects that a loss refers to, because workers have these as they were when workers started.

Examples are a teacher network, a GAN's other half, and a number that is annealed: closure variables, globals, defaults
and the attributes of the loss object. The places of these values are found once, from what cloudpickle would send with
each function; before each step only the values are compared. What the loss itself changes while it computes is
accepted.
"""

import functools
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.torch.attributes import LONGEST, is_plain, read_version
from lockstep.backends.torch.function_references import Reference, find_names, is_imported, list_references
from lockstep.backends.torch.script_changes import compute_checksum
from lockstep.core.objective import Objective
from lockstep.errors import ExactError

_WAYS_OUT = (
    "Put a number into the batch or into a buffer of the model. Make another network a part of the wrapped model: "
    "nn.ModuleDict({'net': net, 'teacher': teacher}), with an objective that calls both "
    "(docs/several-optimizers.md). Or call trainer.close() after such a change, so that the next step starts new "
    "workers, or use devices=1."
)
LARGEST = 2**20  # bytes of an array that are compared; of a larger one only its identity


class LossReferences:
    """Checks what a loss refers to, without the model's modules and tensors, which are sent to the workers anyway."""

    def __init__(self, loss: Any, model: nn.Module) -> None:
        self._loss = loss
        self._own = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
        self._references: list[Reference] | None = None
        self._marks: list[Any] = []
        self._found: set[str] = set()  # what had changed at the last check that found a change
        self._num_changes = self._num_updates = 0
        self._last_change = 0  # the number of updates before that check

    def start(self) -> None:
        """Records the present values, which are now sent to new workers."""
        self._references = list(_find_references(self._loss))
        self._marks = list(map(self._read_mark, self._references))

    @contextmanager
    def accept_changes(self) -> Iterator[None]:
        """A context in which the loss may change what it refers to; the script's earlier changes are still found."""
        is_unchanged = not self._find_changed()
        try:
            yield
        finally:
            if is_unchanged and self._find_changed():
                self.start()

    def count_update(self) -> None:
        """Notes that a step was made: not every step is checked, because there may be no worker to send changes to."""
        self._num_updates += 1

    def check(self) -> int:
        """Returns how often the script has changed something so far; raises ExactError if a change cannot be sent.

        Also raises ExactError if the same value had changed before the previous step, too: after each change the whole
        model is sent again, so no value may change in every step.
        """
        changed = self._find_changed()
        is_next = self._num_updates - self._last_change == 1
        for reference in changed:
            if not reference.is_sent:
                raise ExactError(
                    f"The loss uses {reference.name!r}, which was changed after the workers had imported its module, "
                    f"so they have the old value. {_WAYS_OUT}"
                )
            if is_next and reference.name in self._found:
                raise ExactError(
                    f"The loss uses {reference.name!r}, which was changed before each of the last two steps, and each "
                    f"change sends the whole model to the workers. {_WAYS_OUT}"
                )
        if changed:
            self._found, self._last_change = {reference.name for reference in changed}, self._num_updates
            self._num_changes += 1
            self.start()
        return self._num_changes

    def _find_changed(self) -> list[Reference]:
        pairs = zip(self._references or (), self._marks, strict=True)
        return [reference for reference, mark in pairs if not _is_same(mark, self._read_mark(reference))]

    def _read_mark(self, reference: Reference) -> list[Any] | None:
        value = reference.read()
        return None if id(value) in self._own else self._mark(value)

    def _mark(self, value: Any) -> list[Any] | None:
        """Returns a list of objects and texts by which a changed value is detected; None if it is not compared."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized:  # without memory of plain numbers
                return [value, read_version(value)]
            return [value, read_version(value), value.data_ptr(), compute_checksum(value)]  # `.data` is not counted
        if isinstance(value, nn.Module):
            tensors = [each for each in (*value.parameters(), *value.buffers()) if id(each) not in self._own]
            others = [each for each in value.modules() if id(each) not in self._own]
            plain = [[item for item in vars(each).items() if is_plain(item[1])] for each in others]
            return [value, repr(plain), *(part for each in tensors for part in self._mark(each) or ())]
        if isinstance(value, np.ndarray):
            return [value, zlib.crc32(value.tobytes()) if value.nbytes <= LARGEST else 0]
        if isinstance(value, types.FunctionType):
            return [value]
        if type(value) is dict and len(value) <= LONGEST:
            tensors = [each for each in value.values() if isinstance(each, Tensor)]
            rest = {key: None if isinstance(each, Tensor) else each for key, each in value.items()}
            marks = [[each] if id(each) in self._own else self._mark(each) or () for each in tensors]
            return [repr(rest), *chain.from_iterable(marks)] if all(map(is_plain, rest.values())) else None
        return [repr(value)] if is_plain(value) else None


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two marks are equal: objects by identity, numbers and strings by value."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    pairs = zip(one, other, strict=True)
    return all(left is right or (isinstance(left, int | str) and left == right) for left, right in pairs)


def _find_references(loss: Any) -> Iterator[Reference]:
    """Yields a reference for everything that the loss's code can reach by name."""
    if isinstance(loss, Objective):
        yield from _find_references(loss.function)
    elif isinstance(loss, functools.partial):
        yield from (Reference(str(index), {index: value}, index) for index, value in enumerate(loss.args))
        yield from (Reference(name, loss.keywords, name) for name in loss.keywords)
        yield from _find_references(loss.func)
    elif isinstance(loss, types.MethodType):
        if isinstance(loss.__func__, types.FunctionType):
            yield (owner := Reference("self", {"self": loss.__self__}, "self"))
            yield from _walk_attributes(owner, loss.__func__)
            yield from _walk_function(loss.__func__, set())
    elif isinstance(loss, types.FunctionType):
        yield from _walk_function(loss, set())
    elif isinstance(loss, nn.Module):
        for module in loss.modules():
            yield from _walk_object(module, "forward", types.FunctionType)  # the others are sent with each step
    elif hasattr(loss, "__dict__"):
        yield from _walk_object(loss, "__call__", object)


def _walk_object(owner: Any, method: str, kind: type) -> Iterator[Reference]:
    """Yields an object's attributes, and what its method and the functions among its attributes refer to."""
    for name, value in vars(owner).items():
        if isinstance(value, kind):
            yield Reference(f"{type(owner).__name__}.{name}", vars(owner), name)
    for function in (*vars(owner).values(), getattr(type(owner), method, None)):
        if isinstance(function, types.FunctionType) and not function.__module__.startswith("torch."):
            yield from _walk_function(function, set())
            if not isinstance(owner, nn.Module):
                yield from _walk_attributes(Reference(type(owner).__name__, {"self": owner}, "self"), function)


def _walk_function(function: types.FunctionType, seen: set[int]) -> Iterator[Reference]:
    """Yields what a function and the functions of its file that it uses refer to, with the attributes they name."""
    seen.add(id(function.__code__))
    for reference in list_references(function):
        yield reference
        value = reference.read()
        if isinstance(value, types.FunctionType):
            if value.__module__ == function.__module__ and id(value.__code__) not in seen:
                yield from _walk_function(value, seen)
        else:
            yield from _walk_attributes(reference, function)


def _walk_attributes(owner: Reference, function: types.FunctionType, depth: int = 2) -> Iterator[Reference]:
    """Yields an object's attributes whose names are in a function's code, also if the object does not have them yet.

    Attributes of the object's class are followed as well, and those of an object that one of the attributes refers to.
    """
    value = owner.read()
    if not depth or not hasattr(value, "__dict__") or isinstance(value, nn.Module | Tensor | types.FunctionType):
        return
    names = sorted(find_names(function.__code__))
    if not isinstance(value, type):
        is_sent = owner.is_sent and not isinstance(value, types.ModuleType)
        for name in names:
            yield (attribute := Reference(f"{owner.name}.{name}", vars(value), name, is_sent))
            yield from _walk_attributes(attribute, function, depth - 1)
    for each in value.__mro__ if isinstance(value, type) else type(value).__mro__:
        held = [name for name in names if is_plain(vars(each).get(name, each))]
        is_sent = bool(held) and owner.is_sent and not is_imported(each)
        yield from (Reference(f"{owner.name}.{name}", vars(each), name, is_sent) for name in held)
