"""Digests: sha256 of the state's bytes. Equal digests mean equal bits."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.errors import DivergedError


def hash_arrays(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of every array of a state: of its type, shape and bytes."""
    return {name: _hash_array(*array) for name, array in state.items()}


def hash_copies(copies: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yields the digests of several copies of a state; only arrays that differ from the first copy are hashed again."""
    rest = iter(copies)
    first = next(rest)
    digests = hash_arrays(first)
    yield digests
    for copy in rest:
        yield {
            name: digests[name] if _is_equal(array, first.get(name)) else _hash_array(*array)
            for name, array in copy.items()
        }


def _hash_array(data: Any, dtype: str) -> str:
    digest = hashlib.sha256(f"{dtype}{data.shape}".encode())
    digest.update(_view_bytes(data).data)
    return digest.hexdigest()


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two arrays of a state have the same type, shape and bytes."""
    if one is other:
        return True
    if other is None or (one.dtype, one.data.shape) != (other.dtype, other.data.shape):
        return False
    return bool(np.array_equal(_view_bytes(one.data), _view_bytes(other.data)))


def _view_bytes(data: Any) -> Any:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def hash_state(digests: Mapping[str, str], step: int) -> str:
    """Returns the digest of a whole state from those of its arrays.

    >>> hash_state({"a": "1", "b": "2"}, step=3) == hash_state({"b": "2", "a": "1"}, step=3)
    True
    """
    text = "\n".join([f"step {step}", *(f"{name} {digests[name]}" for name in sorted(digests))])
    return hashlib.sha256(text.encode()).hexdigest()


def check_equal(by_replica: Mapping[int, dict[str, str]], devices: Sequence[str], step: int) -> dict[str, str]:
    """Returns the digests if all replicas have the same; raises DivergedError otherwise."""
    first = by_replica[0]
    for replica, digests in by_replica.items():
        for name in sorted(first.keys() | digests.keys()):
            if digests.get(name) != first.get(name):
                raise DivergedError(
                    f"The replicas have different bits: {name!r} on {devices[replica]} differs from "
                    f"{devices[0]} after step {step}. Please report this, with the model."
                )
    return first
