"""Finds, copies and compares what modules have in attributes besides parameters, buffers and submodules."""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.torch.attributes import read_version

LARGEST = 2**28  # bytes of a tensor that is copied
LONGEST = 1000  # entries of a container that is searched
DEPTH = 3  # of containers in containers

_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, deque)
_KINDS = (*_DICTS, *_LISTS, set)
_KERAS = "keras.src.utils.tracking"  # of the containers that Keras puts in the place of a layer's dicts, lists and sets
_NUMBERS = (bool, int, float, str, np.number, np.bool_)
_OWN = vars(nn.Module()).keys() - {"training"}
_OPAQUE = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, torch.device, torch.dtype)


class TrackedContainer:
    """The attributes of an object, or a list, dict or set, and the values that were recorded last."""

    __slots__ = ("content", "keys", "values", "where")

    def __init__(self, content: Any, where: str) -> None:
        self.content = content
        self.where = where
        self.accept()

    def accept(self) -> None:
        """Records the present values."""
        self.values, self.keys = self.read()

    def read(self) -> tuple[list[Any], list[Any] | None]:
        """Returns the present values, and the keys of a dict."""
        if isinstance(self.content, dict):
            return list(self.content.values()), list(self.content)
        return list(self.content), None

    def has_changed(self) -> bool:
        """Returns whether it now contains other objects than those recorded; compares by identity."""
        content = self.content if self.keys is None else self.content.values()
        return len(content) != len(self.values) or not all(map(is_, content, self.values))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Returns an iterator over (key or position, value) of what was recorded."""
        return zip(range(len(self.values)) if self.keys is None else self.keys, self.values, strict=True)

    def write(self, values: list[Any], keys: list[Any] | None) -> None:
        """Replaces the contents with what `read` returned: the values and, for a dict, the keys."""
        # By the builtin type's methods, because Keras's own also register and unregister a layer's variables.
        kind: Any = find_container_type(self.content)
        if keys is not None:
            given = dict(zip(keys, values, strict=True))
            for key in [key for key in self.content if key not in given]:
                kind.__delitem__(self.content, key)
            for key, value in given.items():
                kind.__setitem__(self.content, key, value)
            return
        kind.clear(self.content)
        (kind.update if kind is set else kind.extend)(self.content, values)

    def describe(self, key: Any) -> str:
        """Returns where a value is, for an error: 'mean' of Net, an entry of 'stats' of Net."""
        return f"{key!r} of {self.where}" if self.keys is not None else self.where


def find_container_type(value: Any) -> type | None:
    """Returns the builtin type (dict, list, ...) of a container that is searched; None for any other value."""
    kind = type(value)
    if kind.__module__ == _KERAS and kind.__base__ is not None:
        kind = kind.__base__
    return kind if kind in _KINDS else None


def is_number_or_string(value: Any) -> bool:
    """Returns whether the value is a number or a string of Python or numpy."""
    return isinstance(value, _NUMBERS)


def find_containers(modules: Iterable[nn.Module], loss: Any, own: set[int]) -> list[TrackedContainer]:
    """Returns each module's attributes, in order, then the containers and plain objects in them and in the loss."""
    found: dict[int, TrackedContainer] = {}

    def walk(value: Any, where: str, depth: int) -> None:
        if isinstance(value, nn.Module):  # a Keras model, or one in a list: not a submodule
            for each in value.modules():
                add_module(each)
            return
        if id(value) in own or id(value) in found or isinstance(value, _OPAQUE):
            return
        if find_container_type(value) is not None:
            if depth and len(value) <= LONGEST:
                add(value, where, depth)
        elif type(value) is tuple:
            for each in value[:LONGEST]:
                walk(each, where, depth - 1)
        elif depth == DEPTH and hasattr(value, "__dict__"):  # an object with attributes of its own
            add(vars(value), where, depth - 1)

    def add(content: Any, where: str, depth: int) -> None:
        if id(content) in found:
            return
        container = found[id(content)] = TrackedContainer(content, where)
        for key, value in container.items():
            if key not in _OWN or not isinstance(key, str):
                walk(value, container.describe(key), depth - 1 if where else depth)

    def add_module(module: nn.Module) -> None:
        if id(vars(module)) not in found:
            container = found[id(vars(module))] = TrackedContainer(vars(module), type(module).__name__)
            walk_module(container)

    def walk_module(container: TrackedContainer) -> None:
        for name, value in container.items():
            if name not in _OWN:
                walk(value, container.describe(name), DEPTH)

    first = [TrackedContainer(vars(module), type(module).__name__) for module in modules]
    found |= {id(container.content): container for container in first}
    for container in first:
        walk_module(container)
    if loss is not None and not isinstance(loss, _OPAQUE):
        walk(loss, f"the loss, {type(loss).__name__}", DEPTH)
    return list(found.values())


def find_tensors(containers: Iterable[TrackedContainer], own: set[int]) -> list[tuple[Tensor, int]]:
    """Returns (tensor, version) for each tensor in the containers whose id is not in `own`, the model's tensors."""
    found = {
        id(value): value
        for container in containers
        for value in container.values
        if isinstance(value, Tensor) and id(value) not in own
    }
    return [(tensor, read_version(tensor)) for tensor in found.values()]


class AttributeSnapshot:
    """The values in containers at one moment; with `cloned` also copies of tensors, which may be written in place."""

    def __init__(self, containers: Iterable[TrackedContainer], own: set[int], cloned: bool) -> None:
        self._held = [(container, *container.read()) for container in containers]
        tensors = {id(each): each for _, values, _ in self._held for each in values if _is_cloned(each, own)}
        self._clones = (
            {key: (each, read_version(each), each.detach().clone()) for key, each in tensors.items()} if cloned else {}
        )

    def restore(self) -> None:
        """Puts the values back into their containers; replaces a tensor that was written in place by its copy."""
        for container, values, keys in self._held:
            container.write([self._get_restored(value) for value in values], keys)

    def _get_restored(self, value: Any) -> Any:
        tensor, counted, clone = self._clones.get(id(value), (None, 0, None))
        return clone if tensor is not None and read_version(tensor) != counted else value

    def find_difference(self, other: "AttributeSnapshot", earlier: "AttributeSnapshot") -> str:
        """Returns the name of a value that differs between two snapshots; an empty string if none does.

        Values are compared under the same key of a dict, or at the same position of lists of equal length.

        Numbers and the bytes of tensors are compared. A table that grows with the inputs may be longer than a shard
        needs. So a tensor that is in the snapshot `earlier` is compared only in the part that both have.
        """
        existing = set(map(id, _walk_tensors(value for _, values, _ in earlier._held for value in values)))
        theirs = {id(container.content): (values, keys) for container, values, keys in other._held}
        for container, values, keys in self._held:
            there, names = theirs.get(id(container.content), ([], None))
            if find_container_type(container.content) in (deque, set) or (keys is None and len(there) != len(values)):
                continue
            ours = dict(zip(range(len(values)) if keys is None else keys, values, strict=True))
            others = dict(zip(range(len(there)) if names is None else names, there, strict=True))
            for key in ours.keys() & others.keys():
                if not _is_same(ours[key], others[key], DEPTH, existing):
                    return container.describe(key)
        return ""


def _is_cloned(value: Any, own: set[int]) -> bool:
    return isinstance(value, Tensor) and id(value) not in own and value.numel() * value.element_size() <= LARGEST


def _walk_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among values and in tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) is tuple:
            yield from _walk_tensors(value)


def _is_same(one: Any, other: Any, depth: int, existing: set[int]) -> bool:
    """Returns False if two tensors have different bytes or two numbers differ; other objects are not compared."""
    if one is other or not depth:
        return True
    if is_number_or_string(one) and is_number_or_string(other):
        return repr(one) == repr(other)  # by repr, so that NaN equals NaN
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.dim(), one.dtype, one.layout) != (other.dim(), other.dtype, other.layout):
            return False
        if one.shape == other.shape:
            return one.layout != torch.strided or has_same_bytes(one, other)
        return id(one) in existing and one.layout == torch.strided and _has_same_overlap(one, other)
    if type(one) is type(other) and isinstance(one, dict):
        return all(_is_same(one[key], other[key], depth - 1, existing) for key in one.keys() & other.keys())
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return all(_is_same(left, right, depth - 1, existing) for left, right in pairs)
    return True


def _has_same_overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have equal bytes in the leading part that both have on every axis.

    They have the same number of axes, with different lengths. False if the common part is empty.
    """
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return one[common].numel() > 0 and has_same_bytes(one[common], other[common])


def has_same_bytes(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one shape and type have equal bytes, including NaN and the signs of zeros."""
    flat = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)
