"""Splits a shard into arrays, which are traced, and plain values, which are compiled in; groups shards into rounds.

An executable is compiled for one `ShardSpec`: the shapes and types of the arrays, and the plain values (booleans,
strings, integers) on which a model may branch. A round is at most one shard per device; their specs may differ.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from lockstep.backends.jax import named_pytrees
from lockstep.core.batches import count
from lockstep.errors import BatchError

_ARRAY = "array"


class ShardSpec(NamedTuple):
    """What an executable is compiled for: a pytree's structure, and for each leaf its shape and type, or its value."""

    structure: Any
    leaves: tuple[Hashable, ...]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Returns the shard's pytree, with these arrays and with its plain values."""
        remaining = iter(arrays)
        values = [next(remaining) if _is_array(leaf) else leaf[1] for leaf in self.leaves]  # type: ignore[index]
        return jax.tree.unflatten(self.structure, values)


class ShardBatch(NamedTuple):
    """One shard's examples, ready for its executable."""

    shard: int
    spec: ShardSpec
    arrays: list[NDArray[Any]]
    examples: int


def split_arrays(piece: Any) -> tuple[ShardSpec, list[NDArray[Any]]]:
    """Splits a shard into its spec and its arrays, which are on the host."""
    leaves, structure = jax.tree.flatten(piece, is_leaf=_is_leaf)
    arrays: list[NDArray[Any]] = []
    specs: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, bool | int | str | bytes | type(None)):
            specs.append(("plain", leaf, type(leaf).__name__))  # with the type, because 1 == True
            continue
        array = _to_numeric(leaf)
        arrays.append(array)
        specs.append((_ARRAY, array.shape, array.dtype))
    return ShardSpec(structure, tuple(specs)), arrays


def iterate_rounds(pieces: Sequence[Mapping[int, Any]]) -> Iterator[list[ShardBatch | None]]:
    """Yields rounds: one shard for each device, or None if the device has no shards left."""
    queues = [[_prepare(shard, own[shard]) for shard in sorted(own)] for own in pieces]
    for index in range(max(map(len, queues))):
        yield [queue[index] if index < len(queue) else None for queue in queues]


def _prepare(shard: int, piece: Any) -> ShardBatch:
    spec, arrays = split_arrays(piece)
    return ShardBatch(shard, spec, arrays, count(piece))


def _is_leaf(value: Any) -> bool:
    """Returns whether JAX should not look inside: a list of numbers is one array, and None is a plain value."""
    return value is None or (isinstance(value, list) and all(isinstance(entry, bool | int | float) for entry in value))


def _is_array(leaf: Any) -> bool:
    """Returns whether an entry of `ShardSpec.leaves` describes an array."""
    return bool(leaf[0] == _ARRAY)


def to_host(leaf: Any) -> NDArray[Any]:
    """Returns an array as a numpy array; raises BatchError if it was donated or holds random keys."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise BatchError(
            f"An array of the batch, of shape {leaf.shape}, cannot be read, because its memory was donated to a jitted "
            "function. Remove donate_argnums from that function."
        )
    if named_pytrees.is_key(leaf):
        raise BatchError(
            f"The batch contains an array of random keys ({leaf.dtype}), which cannot be split into shards. Give "
            "jax.random.key_data(keys), and call jax.random.wrap_key_data in the objective."
        )
    return np.asarray(leaf)


def to_numpy(value: Any) -> NDArray[Any]:
    """Returns an array of outputs in numpy; converts bfloat16, which numpy does not have, to float32."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == jax.numpy.bfloat16 else array


def to_cpu(value: NDArray[Any]) -> Any:
    """Returns a copy of a numpy array as a JAX array on the CPU."""
    return jax.device_put(value, jax.local_devices(backend="cpu")[0], may_alias=False)


def _to_numeric(leaf: Any) -> NDArray[Any]:
    """Returns the leaf as an array in the dtype that JAX would give it; raises BatchError if it has no numbers."""
    array = to_host(leaf)
    if array.dtype.kind not in "biufcV" or array.dtype == object:
        raise BatchError(
            f"The batch contains a {type(leaf).__name__} of {array.dtype}, but JAX only takes numbers. "
            "Convert it to numbers before the step."
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")), copy=False)
