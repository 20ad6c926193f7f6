"""The flat vectors of a partial sum: where gradients and untrained variables are in them, written and read with XLA."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax import named_pytrees
from lockstep.core.averaged_state import AveragedArray
from lockstep.core.layout import Field, Layout
from lockstep.core.metrics import FIRST_METRIC
from lockstep.core.shard_sums import NUM_CHECKS
from lockstep.errors import ModelError

barrier: Any = jax.lax.optimization_barrier
_MAX_FUSED_OPERANDS = 8  # XLA's CPU compiler fuses concatenations of at most this many operands


def choose_sum_dtype(dtype: Any) -> str:
    """Returns the dtype in which arrays of this dtype are added, e.g. float32 for bfloat16."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "float64" if dtype == jnp.float64 else "float32"
    return "int64" if jnp.dtype(dtype).itemsize == 8 else "int32"


def join(parts: Sequence[tuple[int, Any]], length: int) -> Any:
    """Returns one vector of this length with the (offset, vector) parts, which are in order, and zeros between them.

    On a CPU, XLA copies the operands of a long concatenation one by one. It compiles a short concatenation to one loop
    per operand, all as long as the longest operand, and masks the accesses past the end of a shorter operand. With
    AVX-512, masked accesses take 100 times as long on memory that has not been used yet: 300 ms for a vector of 1 MB.
    So a few parts are written one by one into zeros. For many parts this would change the bits, because XLA would also
    fuse the computations of the parts.
    """
    pieces, end = [], 0
    for offset, value in parts:
        pieces += [jnp.zeros(offset - end, value.dtype)] * (offset > end) + [value]
        end = offset + value.size
    pieces += [jnp.zeros(length - end, pieces[0].dtype)] * (length > end)

    def write(*pieces: Any) -> Any:
        # Without the barrier the first write would become a pad, which masks accesses, too.
        vector = barrier(jnp.zeros(length, pieces[0].dtype))
        start = 0
        for piece in pieces:
            vector = jax.lax.dynamic_update_slice(vector, piece, (start,))
            start += piece.size
        return vector

    def concatenate(*pieces: Any) -> Any:
        return jnp.concatenate(pieces)

    cpu = write if len(pieces) <= _MAX_FUSED_OPERANDS else concatenate
    return jax.lax.platform_dependent(*pieces, cpu=cpu, default=concatenate)


def find_changed(before: Any, after: Any) -> tuple[bool, ...]:
    """Returns for every untrained variable whether the model has replaced its array; called while tracing.

    Raises ModelError if a variable was added or removed, or has another shape or kind of numbers.
    """
    structure: Any = jax.tree.structure
    if structure(before) != structure(after):
        different = sorted(named_pytrees.name_leaves(before).keys() ^ named_pytrees.name_leaves(after).keys())
        change = f"added or removed the variable {different[0]!r}" if different else "changed a container of variables"
        raise ModelError(
            f"The model's call has {change}. Create all variables when you create the model, and return them in the "
            "containers in which the call gets them."
        )
    names, old, new = named_pytrees.name_leaves(before), jax.tree.leaves(before), jax.tree.leaves(after)
    for name, one, other in zip(names, old, new, strict=True):
        if one.shape != other.shape:
            raise ModelError(
                f"The model's call changed the shape of the variable {name!r} from {tuple(one.shape)} to "
                f"{tuple(other.shape)}. Write an array of the variable's own shape."
            )
        if _find_kind(one) != _find_kind(other):  # integers come from shard 0, floats are averaged over all shards
            raise ModelError(
                f"The model's call changed the type of the variable {name!r} from {one.dtype} to {other.dtype}. Create "
                f"the variable as {other.dtype}, or cast the array to {one.dtype} before you write it."
            )
    # By identity: a traced value that the model has not replaced is the same object.
    return tuple(one is not other for one, other in zip(old, new, strict=True))


class VectorFields:
    """The fields of the vectors for one model: first the gradients, then the untrained variables that are averaged."""

    def __init__(self, params: Any, rest: Any, room: int) -> None:
        # Only shapes and dtypes are stored, because a step may donate the memory of the arrays.
        params, rest = jax.tree.map(_describe, (params, rest))
        self._params = params
        self._rest = jax.tree.leaves(rest)
        self._averaged = [index for index, leaf in enumerate(self._rest) if _is_averaged(leaf)]
        self.names = names = list(named_pytrees.name_leaves(rest))  # of the untrained variables
        trained = named_pytrees.name_leaves(params)
        check_trained(trained)
        self.layout = Layout.build(
            [(name, choose_sum_dtype(leaf.dtype), tuple(leaf.shape)) for name, leaf in trained.items()],
            [
                (f"rest.{names[index]}", choose_sum_dtype(self._rest[index].dtype), tuple(self._rest[index].shape))
                for index in self._averaged
            ],
            FIRST_METRIC + room + len(names) + NUM_CHECKS,  # before the checks: which of `names` a shard changes
        )
        self._gradients = self.layout.fields[: len(trained)]
        self._others = self.layout.fields[len(trained) :]

    def pack(self, gradients: Any, others: Any, differs: tuple[bool, ...], fraction: Any, first: Any) -> dict[str, Any]:
        """Returns the vectors of one shard's partial sum.

        They hold the gradients; the untrained float arrays, multiplied by the shard's `fraction` of the batch; and the
        untrained integer arrays, which are zeros unless this is shard 0 (`first`).
        """
        values = [leaf.reshape(-1) for leaf in jax.tree.leaves(gradients)]
        variables = jax.tree.leaves(others)
        for index, field in zip(self._averaged, self._others, strict=True):
            value = variables[index].reshape(-1)
            if not differs[index]:
                value = jnp.zeros(field.size, field.dtype)
            elif jnp.issubdtype(value.dtype, jnp.floating):
                value = value.astype(field.dtype)
                value = value if fraction is None else value * fraction.astype(field.dtype)
            else:
                value = jnp.where(first, _to_sum_dtype(value, field.dtype), 0)
            values.append(value)
        lengths = self.layout.lengths
        parts: dict[str, list[tuple[int, Any]]] = {dtype: [] for dtype in lengths}
        for value, field in zip(values, self.layout.fields, strict=True):
            parts[field.dtype].append((field.offset, value.astype(field.dtype)))
        return {dtype: join(each, lengths[dtype]) for dtype, each in parts.items()}

    def read_gradients(self, vectors: Mapping[str, Any], divisor: Any) -> Any:
        """Returns the gradients as a pytree like the parameters, of the same types, divided by `divisor` if given."""
        leaves = []
        for field, leaf in zip(self._gradients, jax.tree.leaves(self._params), strict=True):
            value = _read_field(vectors, field)
            if divisor is not None:  # as a vector behind a barrier: XLA would multiply by the reciprocal of a scalar
                value = value / barrier(jnp.full_like(value, divisor))
            leaves.append(value.astype(leaf.dtype))
        return named_pytrees.replace_leaves(self._params, leaves)

    def replace_changed(self, rest: Any, others: Any, differs: tuple[bool, ...]) -> Any:
        """Returns the untrained variables after a step of one shard; unchanged variables keep their arrays."""
        leaves, new = jax.tree.leaves(rest), jax.tree.leaves(others)
        for index in self._averaged:
            if differs[index]:
                leaves[index] = new[index].astype(leaves[index].dtype)
        return named_pytrees.replace_leaves(rest, leaves)

    def read_others(self, vectors: Mapping[str, Any], rest: Any, differs: tuple[bool, ...]) -> Any:
        """Returns the untrained variables; those that `differs` marks get their averages from the vectors."""
        leaves = jax.tree.leaves(rest)
        for index, field in zip(self._averaged, self._others, strict=True):
            if differs[index]:
                leaves[index] = _from_sum_dtype(_read_field(vectors, field), leaves[index].dtype)
        return named_pytrees.replace_leaves(rest, leaves)


def read_floats(rest: Any, changed: Iterable[bool], writable: bool) -> list[AveragedArray]:
    """Returns copies of the float variables that a shard changes; `writable` says whether the script can write them."""
    return [
        AveragedArray(f"rest.{name}", name, np.asarray(leaf), writable)
        for (name, leaf), differs in zip(named_pytrees.name_leaves(rest).items(), changed, strict=True)
        if differs and _find_kind(leaf) == "real"
    ]


def check_trained(trained: Mapping[str, Any]) -> None:
    """Raises ModelError if there are no parameters, or if a parameter is not of a real floating type."""
    if not trained:
        raise ModelError("The model has no parameters to train. Add a layer or a parameter, or unfreeze some.")
    for name, leaf in trained.items():
        if named_pytrees.is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ModelError(
                f"The parameter {name!r} has the type {leaf.dtype}, but a trained parameter must be a real float. "
                "Create it as a float, or as a variable that is not trained."
            )


def _find_kind(leaf: Any) -> str:
    """Returns whether an array is "real", "complex" or "integer", or has random "keys"."""
    if named_pytrees.is_key(leaf):
        return "keys"
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(leaf.dtype, jnp.floating) else "integer"


def _describe(leaf: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(leaf.shape, leaf.dtype)


def _is_averaged(leaf: Any) -> bool:
    """Returns whether shards add this variable in the tree; they do not for random keys and complex numbers."""
    return _find_kind(leaf) in ("real", "integer")


def _read_field(vectors: Mapping[str, Any], field: Field) -> Any:
    return vectors[field.dtype][field.offset : field.offset + field.size].reshape(field.shape)


def _to_sum_dtype(value: Any, dtype: str) -> Any:
    """Returns integers in the dtype in which they are added; unsigned integers keep their bits."""
    if value.dtype in (jnp.uint32, jnp.uint64):
        return jax.lax.bitcast_convert_type(value, dtype)
    return value.astype(dtype)


def _from_sum_dtype(value: Any, dtype: Any) -> Any:
    """Returns a sum in the variable's own dtype; undoes `_to_sum_dtype`."""
    if dtype in (jnp.uint32, jnp.uint64):
        return jax.lax.bitcast_convert_type(value, dtype)
    return value.astype(dtype)
