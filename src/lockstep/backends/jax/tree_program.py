"""Folding: the tree as one executable that holds additions and moves, and nothing else.

A multiplication or a division beside an addition could be fused with it and
rounded once instead of twice. Between devices only bytes move: every device gets
its slice of everybody's nodes, adds them in tree order, and all gather the sums.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.backends.jax.lazy_sums import Lazy, Leaf, Round, Sum

AXIS = "shard"
lax: Any = jax.lax
SMALL = 1 << 14  # elements; below that, everybody adds everything, which saves a meeting

Expression = Any  # (left, right) of expressions; [round, row] of a leaf, as a frozen pair of numbers


def expression(node: Lazy) -> tuple[Expression, list[Round]]:
    """The additions below a node, and the rounds that its leaves are rows of."""
    rounds: dict[Round, int] = {}

    def of(node: Lazy) -> Expression:
        if isinstance(node, Leaf):
            return rounds.setdefault(node.round, len(rounds)), node.row
        assert isinstance(node, Sum)
        return "+", of(node.left), of(node.right)

    return of(node), list(rounds)


def fold(mesh: Any, tree: Expression, jit: Callable[..., Any]) -> Any:
    """The executable (vectors of every round) -> vectors of the sum, whole on every device."""
    rows = mesh.shape[AXIS]
    inner, outer = _local(tree, rows)

    def one(vectors: Sequence[Any]) -> Any:  # of every round, (1, length)
        if rows == 1:
            return _evaluate(tree, lambda index, _: vectors[index][0])
        held = [_evaluate(part, lambda index, _: vectors[index][0]) for part in inner]
        length = len(held[0])
        if length < SMALL:
            everyone = lax.all_gather(jnp.stack(held), AXIS)  # (rows, nodes, length)
            return _evaluate(outer, lambda index, row: everyone[row, index])
        part = -(-length // rows)
        padded = jnp.stack([jnp.pad(node, (0, part * rows - length)) for node in held])
        mine = lax.all_to_all(padded.reshape(len(held), rows, part), AXIS, 1, 0)  # (rows, nodes, part)
        added = _evaluate(outer, lambda index, row: mine[row, index])
        return lax.all_gather(added, AXIS, tiled=True)[:length]

    def run(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {dtype: one([vectors[dtype] for vectors in rounds]) for dtype in rounds[0]}

    spec: Any = jax.sharding.PartitionSpec
    return jit(jax.shard_map(run, mesh=mesh, in_specs=spec(AXIS), out_specs=spec(), check_vma=False))


def _local(tree: Expression, rows: int) -> tuple[list[Expression], Expression]:
    """What every device may add alone before they meet, and the rest.

    All devices run one program, so they fold alone only where all fold alike;
    else every row of every round is sent.
    """
    own: dict[int, list[Expression]] = {row: [] for row in range(rows)}

    def outer(node: Expression) -> Expression:
        found = _rows(node)
        if len(found) > 1:
            return "+", outer(node[1]), outer(node[2])
        (row,) = found
        own[row].append(_evaluate(node, lambda index, _: (index, 0), lambda left, right: ("+", left, right)))
        return len(own[row]) - 1, row

    rest = outer(tree)
    if all(parts == own[0] for parts in own.values()):
        return own[0], rest
    count = 1 + max(index for index, _ in _leaves(tree))
    return [(index, 0) for index in range(count)], tree


def _evaluate(
    node: Expression,
    leaf: Callable[[int, int], Any],
    add: Callable[[Any, Any], Any] = lambda left, right: left + right,
) -> Any:
    if node[0] == "+":
        return add(_evaluate(node[1], leaf, add), _evaluate(node[2], leaf, add))
    return leaf(*node)


def _leaves(node: Expression) -> list[tuple[int, int]]:
    return [*_leaves(node[1]), *_leaves(node[2])] if node[0] == "+" else [node]


def _rows(node: Expression) -> set[int]:
    return {row for _, row in _leaves(node)}
