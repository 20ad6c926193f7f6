"""Slices of the root, added by each process: together they have the bytes of the tree's own total."""

import numpy as np
import pytest

from lockstep.backends import numpy as backends
from lockstep.backends.base import Recipe
from lockstep.core import tree
from lockstep.core.layout import Layout
from lockstep.core.options import Options
from lockstep.core.plan import Plan
from lockstep.exchange import slices

BACKEND = backends.open(
    Recipe(backends.Dense([3, 2], seed=0), backends.SGD(0.1), "mse", (), Options()),
    ["cpu:0"],
)
LAYOUT = Layout.build(
    [("w", "float32", (700,)), ("b", "float64", (130,))],
    [("mean", "float32", (5,)), ("count", "float64", (3,))],
)


def node(seed):
    generator = np.random.Generator(np.random.PCG64(seed))
    return {
        dtype: (generator.standard_normal(length) * 10.0 ** generator.uniform(-4, 4, length)).astype(dtype)
        for dtype, length in LAYOUT.lengths.items()
    }


def add(left, right):
    return {dtype: left[dtype] + right[dtype] for dtype in left}


def held_by(plan, num_examples, leaves):
    """The partial sums of all replicas after their local merges."""
    held = {}
    for program in tree.programs(plan, num_examples):
        for covered in program.spans:
            held[covered] = tree.total(covered, {tree.Span(i, i + 1): leaf for i, leaf in leaves.items()}, add)
    return held


@pytest.mark.parametrize("block", [100, 1 << 17])
@pytest.mark.parametrize(
    ("num_shards", "num_replicas", "num_examples"),
    [(8, 3, 61), (8, 5, 61), (8, 8, 8), (5, 2, 9), (7, 4, 7), (1, 1, 3), (8, 3, 5), (8, 4, 1)],  # the last two: short
)
def test_slices_have_the_bytes_of_the_tree(monkeypatch, block, num_shards, num_replicas, num_examples):
    monkeypatch.setattr(slices, "BLOCK", block)
    leaves = {shard: node(shard) for shard in range(min(num_shards, num_examples))}
    expected = tree.fold([leaves.get(shard) for shard in range(num_shards)], add)
    held = held_by(Plan.even(num_shards, range(num_replicas)), num_examples, leaves)
    out = {dtype: np.full(length, np.nan, dtype) for dtype, length in LAYOUT.lengths.items()}
    before = {covered: {dtype: vector.tobytes() for dtype, vector in each.items()} for covered, each in held.items()}

    for ranges in LAYOUT.slices(num_replicas):
        slices.Slice(BACKEND, LAYOUT, tree.root(num_shards), held, ranges, out).add(1.0)
    assert {dtype: out[dtype].tobytes() for dtype in out} == {d: expected[d].tobytes() for d in expected}

    by = 7.0
    for ranges in LAYOUT.slices(num_replicas):
        own = slices.Slice(BACKEND, LAYOUT, tree.root(num_shards), held, ranges, out)
        for _ in range(2):  # the views are made once and serve every step
            own.add(by)
    for dtype, end in LAYOUT.divided.items():
        assert out[dtype][:end].tobytes() == (expected[dtype][:end] / np.asarray(by, dtype)).tobytes()
        assert out[dtype][end:].tobytes() == expected[dtype][end:].tobytes()
    after = {covered: {dtype: vector.tobytes() for dtype, vector in each.items()} for covered, each in held.items()}
    assert after == before  # leaves are not overwritten before the commit


def test_a_single_partial_sum_keeps_its_negative_zeros():
    leaf = {dtype: np.full(length, -0.0, dtype) for dtype, length in LAYOUT.lengths.items()}
    out = {dtype: np.zeros(length, dtype) for dtype, length in LAYOUT.lengths.items()}
    slices.Slice(BACKEND, LAYOUT, tree.root(8), {tree.Span(0, 1): leaf}, LAYOUT.slices(1)[0], out).add(1.0)
    assert out["float32"].tobytes() == leaf["float32"].tobytes()
