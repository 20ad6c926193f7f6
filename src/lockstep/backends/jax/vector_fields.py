"""Fields: where gradients and the model's other variables lie in a node's vectors.

The sums stay on the host, in float64 whatever JAX computes in, and take the last
place of the layout.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax import named_pytrees
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.layout import Field, Layout
from lockstep.core.metrics import FIRST_METRIC
from lockstep.errors import ModelError

barrier: Any = jax.lax.optimization_barrier


def accumulated(dtype: Any) -> str:
    """The type in which leaves of this type are added: float64 stays, smaller floats are added in float32."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "float64" if dtype == jnp.float64 else "float32"
    return "int64" if jnp.dtype(dtype).itemsize == 8 else "int32"


def changed(before: Any, after: Any) -> tuple[bool, ...]:
    """For every other variable, whether the model has put something new there; told while tracing."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    structure: Any = jax.tree.structure
    if structure(before) != structure(after):
        raise ModelError(
            "A model keeps the variables it has. Its call has added or removed some. Make them all when it is made."
        )
    for one, other in zip(old, new, strict=True):
        if one.shape != other.shape:
            raise ModelError(
                f"A variable keeps its shape. Got {tuple(other.shape)} where {tuple(one.shape)} was. Keep its shape."
            )
        if _kind(one) != _kind(other):  # whole numbers come from one shard, fractions from all
            raise ModelError(
                f"A variable keeps its kind of numbers. Got {other.dtype} where {one.dtype} was. "
                f"Make it of {other.dtype}, or cast what is written to it."
            )
    return tuple(one is not other for one, other in zip(old, new, strict=True))


class Fields:
    """The layout of a node for one model: gradients, other variables, sums."""

    def __init__(self, params: Any, rest: Any, room: int) -> None:
        self._params = params
        self._rest = jax.tree.leaves(rest)
        self._averaged = [index for index, leaf in enumerate(self._rest) if _adds_up(leaf)]
        self.names = names = list(named_pytrees.named(rest))  # of the other variables
        trained = named_pytrees.named(params)
        check_trained(trained)
        self.layout = Layout.build(
            [(name, accumulated(leaf.dtype), tuple(leaf.shape)) for name, leaf in trained.items()],
            [
                *(
                    (f"rest.{names[index]}", accumulated(self._rest[index].dtype), tuple(self._rest[index].shape))
                    for index in self._averaged
                ),
                # at the end how many shards have changed each of the others, the names' checksum, and 1
                ("sums", "float64", (FIRST_METRIC + room + len(names) + 2,)),
            ],
        )
        self._gradients = self.layout.fields[: len(trained)]
        self._others = self.layout.fields[len(trained) : -1]
        last = self.layout.fields[-1]
        self.lengths = dict(self.layout.lengths)  # of the vectors on the devices, which have no sums
        self.lengths[last.dtype] = last.offset
        self.lengths = {dtype: length for dtype, length in self.lengths.items() if length}

    def vectors(
        self, gradients: Any, others: Any, differs: tuple[bool, ...], fraction: Any, first: Any
    ) -> dict[str, Any]:
        """A leaf's vectors: gradients as they are, other floats in their share, whole numbers from shard 0."""
        values = [leaf.reshape(-1) for leaf in jax.tree.leaves(gradients)]
        kept = jax.tree.leaves(others)
        for index, place in zip(self._averaged, self._others, strict=True):
            value = kept[index].reshape(-1)
            if not differs[index]:
                value = jnp.zeros(place.size, place.dtype)
            elif jnp.issubdtype(value.dtype, jnp.floating):
                value = value.astype(place.dtype)
                value = value if fraction is None else value * fraction.astype(place.dtype)
            else:
                value = jnp.where(first, _whole(value, place.dtype), 0)
            values.append(value)
        parts: dict[str, list[Any]] = {dtype: [] for dtype in self.lengths}
        ends = dict.fromkeys(self.lengths, 0)
        for value, place in zip(values, [*self._gradients, *self._others], strict=True):
            gap = place.offset - ends[place.dtype]
            parts[place.dtype] += [jnp.zeros(gap, place.dtype)] if gap else []
            parts[place.dtype].append(value.astype(place.dtype))
            ends[place.dtype] = place.offset + place.size
        for dtype, length in self.lengths.items():
            gap = length - ends[dtype]
            parts[dtype] += [jnp.zeros(gap, dtype)] if gap else []
        return {dtype: jnp.concatenate(each) for dtype, each in parts.items()}

    def gradients(self, vectors: Mapping[str, Any], divisor: Any) -> Any:
        """The gradients, divided unless `divisor` is None, in the nest and the types of the parameters."""
        leaves = []
        for place, leaf in zip(self._gradients, jax.tree.leaves(self._params), strict=True):
            value = _read(vectors, place)
            if divisor is not None:  # by one number, XLA would multiply by its reciprocal
                value = value / barrier(jnp.full_like(value, divisor))
            leaves.append(value.astype(leaf.dtype))
        return named_pytrees.refilled(self._params, leaves)

    def kept(self, rest: Any, others: Any, differs: tuple[bool, ...]) -> Any:
        """The other variables after a step of one shard: those that it has changed, the rest as they were."""
        leaves, fresh = jax.tree.leaves(rest), jax.tree.leaves(others)
        for index in self._averaged:
            if differs[index]:
                leaves[index] = fresh[index].astype(leaves[index].dtype)
        return named_pytrees.refilled(rest, leaves)

    def others(self, vectors: Mapping[str, Any], rest: Any, differs: tuple[bool, ...]) -> Any:
        """The other variables, those that a shard has changed averaged."""
        leaves = jax.tree.leaves(rest)
        for index, place in zip(self._averaged, self._others, strict=True):
            if differs[index]:
                leaves[index] = _unwhole(_read(vectors, place), leaves[index].dtype)
        return named_pytrees.refilled(rest, leaves)


def read_floats(rest: Any, changed: Iterable[bool], writable: bool) -> list[AveragedArray]:
    """Copy the float variables that a shard changes; `writable` if the script can write to them too."""
    return [
        AveragedArray(f"rest.{name}", name, np.asarray(leaf), writable)
        for (name, leaf), differs in zip(named_pytrees.named(rest).items(), changed, strict=True)
        if differs and _kind(leaf) == "real"
    ]


def check_trained(trained: Mapping[str, Any]) -> None:
    """Refuses parameters that have no gradient in real numbers."""
    if not trained:
        raise ModelError("Training needs a parameter to train. Got a model without any. Give it one.")
    for name, leaf in trained.items():
        if named_pytrees.is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ModelError(
                f"Parameters are real numbers. Got {leaf.dtype} at {name!r}. Keep it among the other variables."
            )


def _kind(leaf: Any) -> str:
    """Keys, complex numbers, real ones or whole ones."""
    if named_pytrees.is_key(leaf):
        return "keys"
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(leaf.dtype, jnp.floating) else "whole"


def _adds_up(leaf: Any) -> bool:
    """Whether a variable goes through the tree; keys and complex constants are left alone."""
    return _kind(leaf) in ("real", "whole")


def _read(vectors: Mapping[str, Any], place: Field) -> Any:
    return vectors[place.dtype][place.offset : place.offset + place.size].reshape(place.shape)


def _whole(value: Any, dtype: str) -> Any:
    """Whole numbers in the type in which they are added; unsigned ones keep their bits."""
    if value.dtype in (jnp.uint32, jnp.uint64):
        return jax.lax.bitcast_convert_type(value, dtype)
    return value.astype(dtype)


def _unwhole(value: Any, dtype: Any) -> Any:
    if dtype in (jnp.uint32, jnp.uint64):
        return jax.lax.bitcast_convert_type(value, dtype)
    return value.astype(dtype)
