"""What modules hold beside parameters, buffers and submodules: their attributes, and containers among these."""

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.torch.attributes import version

LARGEST = 2**28  # bytes of a tensor that is cloned
LONGEST = 1000  # entries of a container that is looked into
DEPTH = 3  # of containers in containers

_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, deque)
_KINDS = (*_DICTS, *_LISTS, set)
_KERAS = "keras.src.utils.tracking"  # of the containers that Keras puts in the place of a layer's dicts, lists and sets
_NUMBERS = (bool, int, float, str, np.number, np.bool_)
_OWN = vars(nn.Module()).keys() - {"training"}
_OPAQUE = (nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, torch.device, torch.dtype)


class Holder:
    """The attributes of one object, or one list, dict or set; and what it held when it was last looked at."""

    __slots__ = ("content", "keys", "values", "where")

    def __init__(self, content: Any, where: str) -> None:
        self.content = content
        self.where = where
        self.look()

    def look(self) -> None:
        """Takes what is there now for seen."""
        self.keys = list(self.content) if isinstance(self.content, dict) else None
        self.values = list(self.content.values() if self.keys is not None else self.content)

    def changed(self) -> bool:
        """Whether it holds other objects than those seen."""
        content = self.content if self.keys is None else self.content.values()
        return len(content) != len(self.values) or not all(map(is_, content, self.values))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """(key or position, value) as they were seen."""
        return zip(range(len(self.values)) if self.keys is None else self.keys, self.values, strict=True)

    def put(self, values: list[Any], keys: list[Any] | None) -> None:
        """Makes the object hold these values."""
        # By the builtin type's methods, because Keras's own take variables off a layer's lists and put them back.
        kind: Any = container_type(self.content)
        if keys is not None:
            given = dict(zip(keys, values, strict=True))
            for key in [key for key in self.content if key not in given]:
                kind.__delitem__(self.content, key)
            for key, value in given.items():
                kind.__setitem__(self.content, key, value)
            return
        kind.clear(self.content)
        (kind.update if kind is set else kind.extend)(self.content, values)

    def name(self, key: Any) -> str:
        """Where a value is, for an error: 'mean' of Net, an entry of 'stats' of Net."""
        return f"{key!r} of {self.where}" if self.keys is not None else self.where


def container_type(value: Any) -> type | None:
    """The builtin type of a container that is looked into; None for everything else."""
    kind = type(value)
    if kind.__module__ == _KERAS and kind.__base__ is not None:
        kind = kind.__base__
    return kind if kind in _KINDS else None


def is_number(value: Any) -> bool:
    """Whether it is a number or a string, Python's or numpy's."""
    return isinstance(value, _NUMBERS)


def find_holders(modules: Iterable[nn.Module], loss: Any, own: set[int]) -> list[Holder]:
    """The attributes of every module, in their order, then the containers and plain objects in them and in a loss."""
    found: dict[int, Holder] = {}

    def walk(value: Any, where: str, depth: int) -> None:
        if isinstance(value, nn.Module):  # a Keras model, or one in a list: none of the modules' own
            for each in value.modules():
                add_module(each)
            return
        if id(value) in own or id(value) in found or isinstance(value, _OPAQUE):
            return
        if container_type(value) is not None:
            if depth and len(value) <= LONGEST:
                add(value, where, depth)
        elif type(value) is tuple:
            for each in value[:LONGEST]:
                walk(each, where, depth - 1)
        elif depth == DEPTH and hasattr(value, "__dict__"):  # an object that holds what the module might
            add(vars(value), where, depth - 1)

    def add(content: Any, where: str, depth: int) -> None:
        if id(content) in found:
            return
        holder = found[id(content)] = Holder(content, where)
        for key, value in holder.items():
            if key not in _OWN or not isinstance(key, str):
                walk(value, holder.name(key), depth - 1 if where else depth)

    def add_module(module: nn.Module) -> None:
        if id(vars(module)) not in found:
            holder = found[id(vars(module))] = Holder(vars(module), type(module).__name__)
            walk_module(holder)

    def walk_module(holder: Holder) -> None:
        for name, value in holder.items():
            if name not in _OWN:
                walk(value, holder.name(name), DEPTH)

    first = [Holder(vars(module), type(module).__name__) for module in modules]
    found |= {id(holder.content): holder for holder in first}
    for holder in first:
        walk_module(holder)
    if loss is not None and not isinstance(loss, _OPAQUE):
        walk(loss, f"the loss, {type(loss).__name__}", DEPTH)
    return list(found.values())


def held_tensors(holders: Iterable[Holder], own: set[int]) -> list[tuple[Tensor, int]]:
    """Every tensor in them that is none of the model's own, with its version."""
    found = {
        id(value): value
        for holder in holders
        for value in holder.values
        if isinstance(value, Tensor) and id(value) not in own
    }
    return [(tensor, version(tensor)) for tensor in found.values()]


class Contents:
    """What holders hold at one moment, with copies of the tensors in case they are written in place."""

    def __init__(self, holders: Iterable[Holder], own: set[int], cloned: bool) -> None:
        self._held = [(holder, list(_values(holder)), _keys(holder)) for holder in holders]
        tensors = {id(each): each for _, values, _ in self._held for each in values if _is_cloned(each, own)}
        self._clones = (
            {key: (each, version(each), each.detach().clone()) for key, each in tensors.items()} if cloned else {}
        )

    def put(self) -> None:
        """Makes the holders hold this again; in the place of a tensor that was written in place stands its copy."""
        for holder, values, keys in self._held:
            holder.put([self._restored(value) for value in values], keys)

    def _restored(self, value: Any) -> Any:
        tensor, counted, clone = self._clones.get(id(value), (None, 0, None))
        return clone if tensor is not None and version(tensor) != counted else value

    def differing(self, other: "Contents", earlier: "Contents") -> str:
        """Where the two hold other numbers or bytes under one name, or at one place of a list that has not grown.

        A table that grows with its inputs is longer than another shard needs: what was there `earlier` need only agree
        with the other as far as both go.
        """
        there_before = set(map(id, _flat_tensors(value for _, values, _ in earlier._held for value in values)))
        theirs = {id(holder.content): (values, keys) for holder, values, keys in other._held}
        for holder, values, keys in self._held:
            there, names = theirs.get(id(holder.content), ([], None))
            if container_type(holder.content) in (deque, set) or (keys is None and len(there) != len(values)):
                continue
            ours = dict(zip(range(len(values)) if keys is None else keys, values, strict=True))
            others = dict(zip(range(len(there)) if names is None else names, there, strict=True))
            for key in ours.keys() & others.keys():
                if not _same(ours[key], others[key], DEPTH, there_before):
                    return holder.name(key)
        return ""


def _values(holder: Holder) -> Iterable[Any]:
    return holder.content.values() if isinstance(holder.content, dict) else holder.content


def _keys(holder: Holder) -> list[Any] | None:
    return list(holder.content) if isinstance(holder.content, dict) else None


def _is_cloned(value: Any, own: set[int]) -> bool:
    return isinstance(value, Tensor) and id(value) not in own and value.numel() * value.element_size() <= LARGEST


def _flat_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and in tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) is tuple:
            yield from _flat_tensors(value)


def _same(one: Any, other: Any, depth: int, there_before: set[int]) -> bool:
    """Whether tensors have equal bytes, and numbers are equal; what is neither is not compared."""
    if one is other or not depth:
        return True
    if is_number(one) and is_number(other):
        return repr(one) == repr(other)  # NaN is NaN
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.dim(), one.dtype, one.layout) != (other.dim(), other.dtype, other.layout):
            return False
        if one.shape == other.shape:
            return one.layout != torch.strided or same_bytes(one, other)
        return id(one) in there_before and one.layout == torch.strided and _agree(one, other)
    if type(one) is type(other) and isinstance(one, dict):
        return all(_same(one[key], other[key], depth - 1, there_before) for key in one.keys() & other.keys())
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        pairs = zip(one, other, strict=True)
        return all(_same(left, right, depth - 1, there_before) for left, right in pairs)
    return True


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of other sizes have equal bytes as far as both go, and have some."""
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return one[common].numel() > 0 and same_bytes(one[common], other[common])


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type have equal bytes, NaN and signs of zeros included."""
    flat = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)
