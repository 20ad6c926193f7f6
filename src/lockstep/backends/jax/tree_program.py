"""Builds the tree's program: one executable that adds the shards' partial sums and does no other arithmetic.

XLA could fuse a multiplication or division with an addition, which rounds once instead of twice. Devices exchange only
bytes: every device gets its slice of all partial sums and adds them in tree order, and all gather the results. So the
order of the additions never depends on an all-reduce.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.core import tree

AXIS = "shard"
lax: Any = jax.lax
_MIN_SLICED = 1 << 14  # elements; every device adds all of a shorter vector, which saves one collective

Expression = Any  # ("+", left, right), or (round, row) of a leaf


def write_expression(places: Mapping[int, tuple[int, int]]) -> Expression:
    """Returns the tree of additions over all shards; its leaves are the shards' (round, row)."""
    return tree.fold([places[shard] for shard in sorted(places)], lambda left, right: ("+", left, right))


def build_fold(mesh: Any, expression: Expression, jit: Callable[..., Any]) -> Any:
    """Returns the executable that adds the vectors of every round; every device gets the complete sum."""
    num_rows = mesh.shape[AXIS]
    inner, outer = _split_local(expression, num_rows)

    def fold_dtype(vectors: Sequence[Any]) -> Any:  # one vector (length,) for every round
        if num_rows == 1:
            return _evaluate(expression, lambda index, _: vectors[index])
        local = [_evaluate(part, lambda index, _: vectors[index]) for part in inner]
        length = len(local[0])
        if length < _MIN_SLICED:
            gathered = lax.all_gather(jnp.stack(local), AXIS)  # (rows, nodes, length)
            return _evaluate(outer, lambda index, row: gathered[row, index])
        part = -(-length // num_rows)  # the length of a slice, rounded up
        padded = jnp.stack([jnp.pad(node, (0, part * num_rows - length)) for node in local])
        received = lax.all_to_all(padded.reshape(len(local), num_rows, part), AXIS, 1, 0)  # (rows, nodes, part)
        added = _evaluate(outer, lambda index, row: received[row, index])
        return lax.all_gather(added, AXIS, tiled=True)[:length]

    def run(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {dtype: fold_dtype([vectors[dtype] for vectors in rounds]) for dtype in rounds[0]}

    spec: Any = jax.sharding.PartitionSpec
    return jit(jax.shard_map(run, mesh=mesh, in_specs=spec(AXIS), out_specs=spec(), check_vma=False))


def _split_local(expression: Expression, num_rows: int) -> tuple[list[Expression], Expression]:
    """Splits the tree into the additions within each device and the additions between devices.

    Returns the local trees, whose leaves are (round, 0), and the rest of the tree, whose leaves are (index of a local
    tree, row). All devices run one program, so they add locally only if their local trees are equal. Otherwise every
    local tree is a single leaf, and all leaves are sent.
    """
    local_parts: dict[int, list[Expression]] = {row: [] for row in range(num_rows)}

    def replace_local(node: Expression) -> Expression:
        rows = _find_rows(node)
        if len(rows) > 1:
            return "+", replace_local(node[1]), replace_local(node[2])
        (row,) = rows
        local_parts[row].append(_evaluate(node, lambda index, _: (index, 0), lambda left, right: ("+", left, right)))
        return len(local_parts[row]) - 1, row

    rest = replace_local(expression)
    if all(parts == local_parts[0] for parts in local_parts.values()):
        return local_parts[0], rest
    count = 1 + max(index for index, _ in _list_leaves(expression))
    return [(index, 0) for index in range(count)], expression


def _evaluate(
    node: Expression,
    leaf: Callable[[int, int], Any],
    add: Callable[[Any, Any], Any] = lambda left, right: left + right,
) -> Any:
    """Computes an expression: `leaf(round, row)` gives the values of its leaves, `add` combines two values."""
    if node[0] == "+":
        return add(_evaluate(node[1], leaf, add), _evaluate(node[2], leaf, add))
    return leaf(*node)


def _list_leaves(node: Expression) -> list[tuple[int, int]]:
    return [*_list_leaves(node[1]), *_list_leaves(node[2])] if node[0] == "+" else [node]


def _find_rows(node: Expression) -> set[int]:
    return {row for _, row in _list_leaves(node)}
