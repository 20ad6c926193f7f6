"""Digests: sha256 of the state's bytes. Equal digests mean equal bits."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lockstep.errors import DivergedError


def hash_arrays(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of every array of a state: the sha256 of the array's type, shape and bytes."""
    return {name: _hash_array(*array) for name, array in state.items()}


def hash_copies(copies: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns the digests of several copies of a state.

    Each array is read from all copies before the next array, so with lazy copies (`LazyState`) only two arrays are in
    memory at a time. Only arrays that differ from the first copy's are hashed again.
    """
    copies = list(copies)
    result: list[dict[str, str]] = [{} for _ in copies]
    for name in dict.fromkeys(chain.from_iterable(copies)):
        for index, digest in _hash_name(name, copies):
            result[index][name] = digest
    return result


def _hash_name(name: str, copies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yields the digest of one array in each copy that has it."""
    first, *others = (index for index, copy in enumerate(copies) if name in copy)
    array = copies[first][name]
    digest = _hash_array(*array)
    yield first, digest
    for index in others:
        yield index, _hash_like(copies[index][name], array, digest)


def _hash_like(array: Any, known: Any, digest: str) -> str:
    """Returns the digest of an array; if the array equals `known`, returns `digest` without hashing."""
    return digest if _is_equal(array, known) else _hash_array(*array)


def hash_vectors(vectors: Iterable[Any]) -> str:
    """Returns the sha256 of the bytes of several vectors, one after another."""
    digest = hashlib.sha256()
    for vector in vectors:
        digest.update(_view_bytes(vector).data)
    return digest.hexdigest()


def _hash_array(data: Any, dtype: str) -> str:
    digest = hashlib.sha256(f"{dtype}{data.shape}".encode())
    digest.update(_view_bytes(data).data)
    return digest.hexdigest()


def _is_equal(one: Any, other: Any) -> bool:
    """Returns whether two arrays of a state have the same type, shape and bytes."""
    if one is other:
        return True
    if (one.dtype, one.data.shape) != (other.dtype, other.data.shape):
        return False
    return bool(np.array_equal(_view_bytes(one.data), _view_bytes(other.data)))


def _view_bytes(data: Any) -> Any:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def hash_state(digests: Mapping[str, str], step: int) -> str:
    """Returns the digest of a whole state from the digests of its arrays.

    >>> hash_state({"a": "1", "b": "2"}, step=3) == hash_state({"b": "2", "a": "1"}, step=3)
    True
    """
    text = "\n".join([f"step {step}", *(f"{name} {digests[name]}" for name in sorted(digests))])
    return hashlib.sha256(text.encode()).hexdigest()


def check_equal(by_replica: Mapping[int, dict[str, str]], devices: Sequence[str], step: int) -> dict[str, str]:
    """Returns the digests if they are equal on all replicas; raises DivergedError otherwise."""
    first = by_replica[0]
    for replica, digests in by_replica.items():
        for name in sorted(first.keys() | digests.keys()):
            if digests.get(name) != first.get(name):
                raise DivergedError(
                    f"The replicas have different bits: {name!r} on {devices[replica]} differs from {devices[0]} after "
                    f"step {step}. Check that only the trainer changes the model during training; if so, please report "
                    "this, with the model."
                )
    return first
