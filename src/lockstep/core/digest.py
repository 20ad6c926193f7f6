"""Digests: sha256 of the state's bytes. Equal digests, equal bits."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.errors import DivergedError


def of_arrays(state: Mapping[str, Any]) -> dict[str, str]:
    """The digest of every array of a state: its type, its shape and its bytes."""
    return {name: _of_array(*array) for name, array in state.items()}


def of_copies(copies: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The digests of several copies of a state; only what differs from the first is hashed again."""
    rest = iter(copies)
    first = next(rest)
    known = of_arrays(first)
    yield known
    for copy in rest:
        yield {
            name: known[name] if _same(array, first.get(name)) else _of_array(*array) for name, array in copy.items()
        }


def _of_array(data: Any, dtype: str) -> str:
    digest = hashlib.sha256(f"{dtype}{data.shape}".encode())
    digest.update(_raw(data).data)
    return digest.hexdigest()


def _same(one: Any, other: Any) -> bool:
    """Whether two arrays of a state have the same type, shape and bytes."""
    if one is other:
        return True
    if other is None or (one.dtype, one.data.shape) != (other.dtype, other.data.shape):
        return False
    return bool(np.array_equal(_raw(one.data), _raw(other.data)))


def _raw(data: Any) -> Any:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def of_state(digests: Mapping[str, str], step: int) -> str:
    """The digest of a whole state out of those of its arrays.

    >>> of_state({"a": "1", "b": "2"}, step=3) == of_state({"b": "2", "a": "1"}, step=3)
    True
    """
    text = "\n".join([f"step {step}", *(f"{name} {digests[name]}" for name in sorted(digests))])
    return hashlib.sha256(text.encode()).hexdigest()


def agreed(everyone: Mapping[int, dict[str, str]], devices: Sequence[str], step: int) -> dict[str, str]:
    """The digests that every replica has; raises where one differs."""
    first = everyone[0]
    for replica, digests in everyone.items():
        for name in sorted(first.keys() | digests.keys()):
            if digests.get(name) != first.get(name):
                raise DivergedError(
                    f"Every replica holds the same bits. {name!r} on {devices[replica]} differs from "
                    f"{devices[0]} after step {step}. Report this, with the model."
                )
    return first
