"""Batches: a shard's arrays apart from its plain values, and shards in rounds.

An executable is compiled for one form: the shapes and types of the arrays, and
the plain values (flags, names, whole numbers) that a model may branch on. In a
round every device has one shard, of whatever form.
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


class Form(NamedTuple):
    """What an executable is compiled for: the nest, and for every leaf its shape and type or its plain value."""

    nest: Any
    leaves: tuple[Hashable, ...]

    def filled(self, arrays: Sequence[Any]) -> Any:
        """The nest with arrays in their places."""
        rest = iter(arrays)
        values = [next(rest) if _is_array(leaf) else leaf[1] for leaf in self.leaves]  # type: ignore[index]
        return jax.tree.unflatten(self.nest, values)


class Place(NamedTuple):
    """One shard of a round."""

    shard: int
    form: Form
    arrays: list[NDArray[Any]]
    examples: int


def split(piece: Any) -> tuple[Form, list[NDArray[Any]]]:
    """The form of a shard, and its arrays on the host."""
    leaves, nest = jax.tree.flatten(piece, is_leaf=_is_leaf)
    arrays: list[NDArray[Any]] = []
    forms: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, bool | int | str | bytes | type(None)):
            forms.append(("plain", leaf, type(leaf).__name__))
            continue
        array = _numbers(leaf)
        arrays.append(array)
        forms.append((_ARRAY, array.shape, array.dtype))
    return Form(nest, tuple(forms)), arrays


def rounds(pieces: Sequence[Mapping[int, Any]]) -> Iterator[list[Place | None]]:
    """The shards of every device in rounds, one for each device; a device may have none in the last."""
    queues = [[_place(shard, own[shard]) for shard in sorted(own)] for own in pieces]
    for depth in range(max(map(len, queues))):
        yield [queue[depth] if depth < len(queue) else None for queue in queues]


def _place(shard: int, piece: Any) -> Place:
    form, arrays = split(piece)
    return Place(shard, form, arrays, count(piece))


def _is_leaf(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(entry, bool | int | float) for entry in value))


def _is_array(leaf: Any) -> bool:
    return bool(leaf[0] == _ARRAY)


def on_host(leaf: Any) -> NDArray[Any]:
    """An array's elements, on the host."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise BatchError(
            f"A batch's arrays are there. Got one of shape {leaf.shape} whose memory was donated. "
            "Leave donate_argnums out where the batch goes on."
        )
    if named_pytrees.is_key(leaf):
        raise BatchError(
            f"A batch's arrays are numbers. Got {leaf.dtype}, keys of JAX's generators. Give "
            "jax.random.key_data(keys), and make keys of it in the objective: jax.random.wrap_key_data(numbers)."
        )
    return np.asarray(leaf)


def to_numpy(value: Any) -> NDArray[Any]:
    """Outputs as numpy has them; it has no bfloat16, so those leave as float32."""
    found = np.asarray(value)
    return found.astype(np.float32) if found.dtype == jax.numpy.bfloat16 else found


def on_cpu(value: NDArray[Any]) -> Any:
    """An array of JAX's on the CPU, in memory of its own."""
    return jax.device_put(value, jax.local_devices(backend="cpu")[0], may_alias=False)


def _numbers(leaf: Any) -> NDArray[Any]:
    """An array of numbers in the type in which JAX will hold it."""
    array = on_host(leaf)
    if array.dtype.kind not in "biufcV" or array.dtype == object:
        raise BatchError(
            f"JAX computes on arrays of numbers. Got {type(leaf).__name__} of {array.dtype}. "
            "Turn it into numbers before the step."
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")), copy=False)
