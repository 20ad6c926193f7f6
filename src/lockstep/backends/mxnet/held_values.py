"""Numbers and arrays that blocks hold beside their parameters: in attributes, and in lists, tuples and dicts there."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import gluon, nd
from mxnet.gluon import rnn

_DEPTH = 3  # containers in containers
_ENTRIES = 1000  # of a container that is looked into
# What gluon's own classes keep; a cell counts its calls to name what it makes.
_INTERNAL = frozenset({*vars(gluon.HybridBlock()), *vars(rnn.RecurrentCell()), "skip_states"})


class Place(NamedTuple):
    """A container that a pass may write to, and what was in it."""

    name: str
    container: Any
    content: Any


def find_blocks(roots: Sequence[Any]) -> list[Any]:
    """Return the script's own blocks whose Python runs in every call: a hybridized one runs as a graph."""
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
    """What some blocks hold at one time; `with_arrays` copies the arrays, so that writes in place show too."""

    def __init__(self, watched: Sequence[Any], with_arrays: bool) -> None:
        self.places: list[Place] = []
        self.arrays: dict[str, tuple[Any, Any]] = {}  # by name, the array and a copy of it
        self._seen: set[int] = set()
        self._with_arrays = with_arrays
        for block in watched:
            where = f"{block.name}."
            self._add_container(where, vars(block), _read_attributes(block), _DEPTH)

    def _add_container(self, name: str, container: Any, content: Any, depth: int) -> None:
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        self.places.append(Place(name, container, content))
        if isinstance(content, dict):
            for key, value in content.items():
                self._add_value(_join(name, key), value, depth)
        else:
            for key, value in enumerate(content):
                self._add_value(_join(name, key), value, depth)

    def _add_value(self, name: str, value: Any, depth: int) -> None:
        if is_array(value):
            if self._with_arrays:
                self.arrays[name] = value, value.copy()
        elif depth and isinstance(value, dict | list | tuple) and len(value) <= _ENTRIES:
            self._add_container(name, value, value if isinstance(value, tuple) else value.copy(), depth - 1)

    def find_changed_number(self) -> tuple[str, Any, Any] | None:
        """Return the name of a number or string that is another one now, what it was and what it is."""
        for place in self.places:
            now = place.container
            if isinstance(now, tuple) or (isinstance(now, list) and len(now) != len(place.content)):
                continue  # a list that grows is a record, as far as no result shows it
            for key, value in place.content.items() if isinstance(now, dict) else enumerate(place.content):
                if not _is_plain(value):
                    continue
                other = now.get(key) if isinstance(now, dict) else now[key]
                if other is not value and not is_array(other) and repr(other) != repr(value):  # NaN is NaN
                    return _join(place.name, key), value, other
        return None

    def has_changed(self) -> bool:
        """Return whether an array, or what is in a container, is another one now."""
        return any(_replaced(place) for place in self.places) or any(
            not same_bytes(array, copy) for array, copy in self.arrays.values()
        )

    def find_difference(self, other: "HeldValues") -> str | None:
        """Return the name of an array that is there in both and has other bytes; a list that grows is a record."""
        lengths = {place.name: len(place.content) for place in other.places}
        grown = tuple(
            f"{place.name}["
            for place in self.places
            if isinstance(place.content, list) and len(place.content) != lengths.get(place.name)
        )
        for name, (_, copy) in self.arrays.items():
            if name in other.arrays and not name.startswith(grown) and not same_bytes(copy, other.arrays[name][1]):
                return name
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array; (1,) if there is none of this name."""
        return tuple(self.arrays[name][0].shape) if name in self.arrays else (1,)

    def restore(self) -> None:
        """Put everything back that was there."""
        for place in self.places:
            if isinstance(place.container, list):
                place.container[:] = place.content
            elif isinstance(place.container, dict) and _replaced(place):
                for key in _keys(place) - place.content.keys():
                    del place.container[key]
                place.container.update(place.content)
        for array, copy in self.arrays.values():
            if not same_bytes(array, copy):
                if isinstance(array, nd.NDArray):
                    copy.copyto(array)
                else:
                    array[...] = copy


def is_array(value: Any) -> bool:
    """Return whether it is an array of numpy's or MXNet's."""
    return isinstance(value, np.ndarray | nd.NDArray)


def same_bytes(one: Any, other: Any) -> bool:
    """Return whether two arrays have the same shape, type and bytes."""
    first, second = (each.asnumpy() if isinstance(each, nd.NDArray) else each for each in (one, other))
    return (first.shape, first.dtype, first.tobytes()) == (second.shape, second.dtype, second.tobytes())


def _read_attributes(block: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(block).items() if _is_attribute(name, value)}


def _is_attribute(name: str, value: Any) -> bool:
    return name not in _INTERNAL and not isinstance(value, gluon.Block | gluon.Parameter | gluon.ParameterDict)


def _keys(place: Place) -> set[Any]:
    return {key for key, value in place.container.items() if not place.name.endswith(".") or _is_attribute(key, value)}


def _replaced(place: Place) -> bool:
    """Return whether other objects are in the container now."""
    now, before = place.container, place.content
    if isinstance(now, tuple):
        return False
    if isinstance(now, list):
        return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))
    return _keys(place) != before.keys() or any(now[key] is not value for key, value in before.items())


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str | np.generic)


def _join(name: str, key: Any) -> str:
    return f"{name}{key}" if name.endswith(".") else f"{name}[{key!r}]"


def iterate_names(places: Sequence[Place]) -> Iterator[str]:
    """Yield the names of what has been replaced."""
    for place in places:
        if isinstance(place.container, dict):
            for key in place.container:
                if place.content.get(key) is not place.container[key] and (
                    not place.name.endswith(".") or _is_attribute(key, place.container[key])
                ):
                    yield _join(place.name, key)
        elif _replaced(place):
            yield place.name
