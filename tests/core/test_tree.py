"""The order of additions does not depend on the plan or on the order in which partial sums arrive."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import tree
from lockstep.core.plan import Plan
from lockstep.core.tree import Merge, Span, Write
from lockstep.errors import PlanError

MAX_SHARDS = 17


def spell(left, right):
    return f"({left}+{right})"


def leaves(num_shards):
    """One float32 vector per shard, of such different sizes that the order of additions shows."""
    generator = np.random.Generator(np.random.PCG64(num_shards))
    scale = 10.0 ** generator.uniform(-3, 3, (num_shards, 64))
    return list((generator.standard_normal((num_shards, 64)) * scale).astype(np.float32))


def by_rounds(values, add):
    """The tree once more: slot i takes i+1, then i+2, then i+4."""
    slots = list(values)
    stride = 1
    while stride < len(slots):
        for left in range(0, len(slots) - stride, 2 * stride):
            there = [value for value in (slots[left], slots[left + stride]) if value is not None]
            slots[left] = add(*there) if len(there) == 2 else there[0] if there else None
        stride *= 2
    return slots[0]


def run(program, values):
    """The partial sums that remain when a replica has run its program."""
    slots = [None] * program.slots
    for action in program.actions:
        match action:
            case Write(shard, slot):
                slots[slot] = values[shard]
            case Merge(left, right):
                slots[left], slots[right] = slots[left] + slots[right], None
    return {span: slots[slot] for span, slot in program.spans.items()}


@pytest.mark.parametrize("num_shards", range(4, MAX_SHARDS + 1))
def test_another_order_gives_other_bytes(num_shards):
    values = leaves(num_shards)
    assert tree.fold(values, np.add).tobytes() != sum(values[1:], values[0]).tobytes()


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_fold_is_the_tree_of_rounds(num_shards):
    names = [str(shard) for shard in range(num_shards)]
    assert tree.fold(names, spell) == by_rounds(names, spell)


@given(st.lists(st.sampled_from([None, "x"]), min_size=1, max_size=MAX_SHARDS))
def test_a_merge_with_a_missing_side_copies_the_other(present):
    names = [value and str(shard) for shard, value in enumerate(present)]
    assert tree.fold(names, spell) == by_rounds(names, spell)


@st.composite
def plans(draw):
    num_shards = draw(st.integers(1, MAX_SHARDS))
    num_replicas = draw(st.integers(1, num_shards))
    owner = st.integers(0, num_replicas - 1)
    return Plan(tuple(draw(st.lists(owner, min_size=num_shards, max_size=num_shards))), tuple(range(num_replicas)))


@given(plans(), st.data())
def test_bytes_do_not_depend_on_plan_arrival_or_local_merges(plan, data):
    values = leaves(plan.num_shards)
    filled = data.draw(st.integers(1, plan.num_shards), label="shards with examples")
    values[filled:] = [None] * (plan.num_shards - filled)
    programs = tree.programs(plan, filled)
    spans = [item for program in programs for item in run(program, values).items()]
    arrived = dict(data.draw(st.permutations(spans), label="arrival"))
    found = tree.total(tree.root(plan.num_shards), arrived, np.add)
    assert found.tobytes() == tree.fold(values, np.add).tobytes()


@pytest.mark.parametrize(
    ("num_replicas", "spans"),
    [
        (3, [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8)]]),
        (5, [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 7)], [(7, 8)]]),
    ],
)
def test_spans_that_do_not_align_are_added_to_the_same_bytes(num_replicas, spans):
    values = leaves(8)
    held = [run(program, values) for program in tree.programs(Plan.even(8, range(num_replicas)), 8)]
    assert [list(each) for each in held] == spans
    merged = {span: value for each in held for span, value in each.items()}
    assert tree.total(tree.root(8), merged, np.add).tobytes() == tree.fold(values, np.add).tobytes()


@given(plans())
def test_a_program_merges_all_that_the_tree_allows(plan):
    for replica, program in enumerate(tree.programs(plan, plan.num_shards)):
        covered = sorted(shard for span in program.spans for shard in range(*span))
        assert covered == plan.shards_of([replica])
        for span in tree._walk_inner(tree.root(plan.num_shards)):
            assert not all(half in program.spans for half in span.halves)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8, 13, 64])
def test_slots_grow_with_the_logarithm(num_shards):
    assert tree.program(range(num_shards), num_shards).slots <= num_shards.bit_length()
    for start in range(num_shards):
        for stop in range(start + 1, num_shards + 1):
            assert tree.program(range(start, stop), num_shards).slots <= 2 * (stop - start).bit_length()


def test_a_program_does_not_depend_on_the_order_of_its_shards():
    assert tree.program([5, 0, 3, 1], 8) == tree.program([0, 1, 3, 5], 8)


@pytest.mark.parametrize(
    ("num_shards", "halves"),
    [(2, ((0, 1), (1, 2))), (3, ((0, 2), (2, 3))), (5, ((0, 4), (4, 5))), (8, ((0, 4), (4, 8)))],
)
def test_a_span_splits_at_the_largest_power_of_two(num_shards, halves):
    assert tree.root(num_shards).halves == halves


def test_the_total_of_no_partial_sums_is_none():
    assert tree.total(Span(0, 4), {}, spell) is None


def test_a_tree_without_shards_is_refused():
    with pytest.raises(PlanError) as caught:
        tree.root(0)
    assert str(caught.value) == "num_shards must be 1 or more. Got num_shards=0. Use num_shards=1, for example."
