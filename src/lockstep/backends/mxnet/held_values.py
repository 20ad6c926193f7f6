"""Copies, compares and restores the numbers and arrays in blocks' attributes, and in lists, tuples and dicts there."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import gluon, nd
from mxnet.gluon import rnn

_DEPTH = 3  # how many levels of containers in containers are searched
_ENTRIES = 1000  # longer containers are not searched
# Attributes of gluon's own classes; a recurrent cell counts its calls, to name its operators.
_INTERNAL = frozenset({*vars(gluon.HybridBlock()), *vars(rnn.RecurrentCell()), "skip_states"})


class HeldContainer(NamedTuple):
    """A container that a pass may write to, and a copy of it."""

    name: str
    container: Any
    content: Any


def find_blocks(roots: Sequence[Any]) -> list[Any]:
    """Returns the script's own blocks whose Python code runs in every call; hybridized blocks run as graphs."""
    found = [each for root in roots if isinstance(root, gluon.Block) for each in _walk(root)]
    return list(dict.fromkeys(found))


def _walk(block: Any) -> Iterator[Any]:
    if _is_hybridized(block):
        return
    if not type(block).__module__.startswith(("mxnet.", "lockstep.backends.")):
        yield block
    for child in block._children.values():
        yield from _walk(child)


def _is_hybridized(block: Any) -> bool:
    hybrid = isinstance(block, gluon.HybridBlock) and type(block).forward is gluon.HybridBlock.forward
    return hybrid and bool(block._active)


class HeldValues:
    """The values that blocks have at one time; `with_arrays` also copies arrays, so that writes to them are noticed."""

    def __init__(self, watched: Sequence[Any], with_arrays: bool) -> None:
        self.containers: list[HeldContainer] = []
        self.arrays: dict[str, tuple[Any, Any]] = {}  # by name, the array and a copy of it
        self._seen: set[int] = set()
        self._with_arrays = with_arrays
        for block in watched:
            self._add_container(f"{block.name}.", vars(block), _read_attributes(block), _DEPTH)

    def _add_container(self, name: str, container: Any, content: Any, depth: int) -> None:
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        self.containers.append(HeldContainer(name, container, content))
        if isinstance(content, dict):
            for key, value in content.items():
                self._add_value(_join_name(name, key), value, depth)
        else:
            for key, value in enumerate(content):
                self._add_value(_join_name(name, key), value, depth)

    def _add_value(self, name: str, value: Any, depth: int) -> None:
        if is_array(value):
            if self._with_arrays:
                self.arrays[name] = value, value.copy()
        elif depth and isinstance(value, dict | list | tuple) and len(value) <= _ENTRIES:
            self._add_container(name, value, value if isinstance(value, tuple) else value.copy(), depth - 1)

    def find_changed_number(self) -> tuple[str, Any, Any] | None:
        """Returns the name, the old and the new value of a number or string that has changed; None if none has."""
        for held in self.containers:
            now = held.container
            if isinstance(now, tuple) or (isinstance(now, list) and len(now) != len(held.content)):
                continue  # a list that grows is a log, which is allowed
            for key, value in held.content.items() if isinstance(now, dict) else enumerate(held.content):
                if not _is_plain(value):
                    continue
                other = now.get(key) if isinstance(now, dict) else now[key]
                if other is not value and not is_array(other) and repr(other) != repr(value):  # so that NaN equals NaN
                    return _join_name(held.name, key), value, other
        return None

    def has_changed(self) -> bool:
        """Returns whether an array or the content of a container has changed."""
        return any(_has_other_objects(held) for held in self.containers) or any(
            not same_bytes(array, copy) for array, copy in self.arrays.values()
        )

    def find_difference(self, other: "HeldValues") -> str | None:
        """Returns the name of an array whose bytes differ in `other`, or None; skips lists that have grown (logs)."""
        lengths = {held.name: len(held.content) for held in other.containers}
        grown = tuple(
            f"{held.name}["
            for held in self.containers
            if isinstance(held.content, list) and len(held.content) != lengths.get(held.name)
        )
        for name, (_, copy) in self.arrays.items():
            if name in other.arrays and not name.startswith(grown) and not same_bytes(copy, other.arrays[name][1]):
                return name
        return None

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array; (1,) if there is no array of this name."""
        return tuple(self.arrays[name][0].shape) if name in self.arrays else (1,)

    def restore(self) -> None:
        """Restores all containers and arrays to these values."""
        for held in self.containers:
            if isinstance(held.container, list):
                held.container[:] = held.content
            elif isinstance(held.container, dict) and _has_other_objects(held):
                for key in _list_keys(held) - held.content.keys():
                    del held.container[key]
                held.container.update(held.content)
        for array, copy in self.arrays.values():
            if not same_bytes(array, copy):
                if isinstance(array, nd.NDArray):
                    copy.copyto(array)
                else:
                    array[...] = copy


def is_array(value: Any) -> bool:
    """Returns whether a value is an array of numpy or MXNet."""
    return isinstance(value, np.ndarray | nd.NDArray)


def same_bytes(one: Any, other: Any) -> bool:
    """Returns whether two arrays have the same shape, type and bytes."""
    first, second = (each.asnumpy() if isinstance(each, nd.NDArray) else each for each in (one, other))
    return (first.shape, first.dtype, first.tobytes()) == (second.shape, second.dtype, second.tobytes())


def _read_attributes(block: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(block).items() if _is_attribute(name, value)}


def _is_attribute(name: str, value: Any) -> bool:
    return name not in _INTERNAL and not isinstance(value, gluon.Block | gluon.Parameter | gluon.ParameterDict)


def _list_keys(held: HeldContainer) -> set[Any]:
    return {key for key, value in held.container.items() if not held.name.endswith(".") or _is_attribute(key, value)}


def _has_other_objects(held: HeldContainer) -> bool:
    """Returns whether objects in a container were added, removed or replaced since the container was copied."""
    now, before = held.container, held.content
    if isinstance(now, tuple):
        return False
    if isinstance(now, list):
        return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))
    return _list_keys(held) != before.keys() or any(now[key] is not value for key, value in before.items())


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str | np.generic)


def _join_name(name: str, key: Any) -> str:
    return f"{name}{key}" if name.endswith(".") else f"{name}[{key!r}]"


def iterate_names(containers: Sequence[HeldContainer]) -> Iterator[str]:
    """Yields the names of values in these containers that were replaced since they were copied."""
    for held in containers:
        if isinstance(held.container, dict):
            for key in held.container:
                if held.content.get(key) is not held.container[key] and (
                    not held.name.endswith(".") or _is_attribute(key, held.container[key])
                ):
                    yield _join_name(held.name, key)
        elif _has_other_objects(held):
            yield held.name
