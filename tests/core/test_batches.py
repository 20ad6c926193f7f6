"""Splitting batches into shards, lists in batches, fingerprints and descriptions."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import batches
from lockstep.core.plan import Plan
from lockstep.errors import BatchError


class Pair(NamedTuple):
    left: object
    right: object


def nests(num_examples):
    """Nests whose arrays and lists hold `num_examples`, beside scalars and strings."""
    numbers = np.arange(num_examples)
    cut = st.sampled_from([numbers, np.stack([numbers, -numbers], 1), numbers.astype(str), [*map(str, numbers)]])
    whole = st.sampled_from([0.5, 3, "text", None, True, np.float32(2), np.array(7)])
    return st.recursive(
        cut | whole,
        lambda inner: (
            st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


@st.composite
def dealt(draw):
    num_examples = draw(st.integers(1, 40))
    return num_examples, (np.arange(num_examples), draw(nests(num_examples)))


@given(dealt(), st.integers(1, 12))
def test_splitting_and_joining_restores_the_batch(case, num_shards):
    num_examples, batch = case
    pieces = batches.cut(batch, num_shards)
    assert batches.count(batch) == num_examples
    assert [piece is None for piece in pieces] == [shard >= num_examples for shard in range(num_shards)]
    arrays = tuple(value for value in batches.leaves(batch) if batches.is_array(value))
    if arrays:
        parts = [piece for piece in batches.cut(arrays, num_shards) if piece is not None]
        np.testing.assert_equal(batches.join(parts, np.concatenate), arrays)


@given(dealt(), st.integers(1, 12), st.data())
def test_every_example_is_in_exactly_one_shard_in_order(case, num_shards, data):
    num_examples, batch = case
    num_replicas = data.draw(st.integers(1, num_shards))
    owners = data.draw(st.lists(st.integers(0, num_replicas - 1), min_size=num_shards, max_size=num_shards))
    split = data.draw(st.integers(0, num_replicas))  # two processes
    groups = [list(range(split)), list(range(split, num_replicas))]
    parts = batches.deal(batch, Plan(tuple(owners), tuple(range(num_replicas))), groups)
    assert [list(part) for part in parts] == groups
    shards = {}
    for part in parts:
        for replica, pieces in part.items():
            assert all(owners[shard] == replica for shard in pieces)
            shards |= pieces
    seen = [example for shard in sorted(shards) for example in shards[shard][0]]
    assert seen == list(range(num_examples))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([np.zeros(2), np.ones(2)], (np.zeros(2), np.ones(2))),  # as loaders make it
        ([np.zeros(2), "text"], (np.zeros(2), "text")),
        (["a", "b"], ["a", "b"]),
        ((np.zeros(2),), (np.zeros(2),)),
        ([], []),
    ],
)
def test_a_list_of_arrays_at_the_top_is_a_tuple(value, expected):
    found = batches.restore_tuples(value)
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


FIVE = [np.zeros((2, 4))] * 5  # an entry for each of five examples
SIZES = [np.zeros((size, 4)) for size in (3, 1, 2)]  # and for each of three, of any length


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([FIVE, np.zeros(5)], (list, np.ndarray)),
        ((FIVE, np.zeros(5)), (list, np.ndarray)),
        ([FIVE, ["a"] * 5], (list, list)),
        ([FIVE, [{"boxes": np.zeros((3, 4))}] * 5], (list, list)),
        ([SIZES, SIZES], (list, list)),  # nothing beside, and no length that all have
        ([[np.zeros(4), np.ones(4)], np.zeros(4)], (tuple, np.ndarray)),
        ([[np.zeros(4), np.ones(4)], [np.zeros(4)]], (tuple, tuple)),
        ([[np.zeros(2), np.ones(2)], np.zeros(2)], (tuple, np.ndarray)),  # both ways: as in the batches before a tail
    ],
)
def test_an_inner_list_of_examples_stays_a_list(batch, expected):
    found = batches.restore_tuples(batch)
    assert tuple(map(type, found)) == expected
    assert [len(part) for part in found] == [len(part) for part in batch]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (slice(1, 3), (np.array([1, 2]), {"names": ["b", "c"], "rate": 0.5})),
        ([3, 0], (np.array([3, 0]), {"names": ["d", "a"], "rate": 0.5})),
        (np.array([2]), (np.array([2]), {"names": ["c"], "rate": 0.5})),
    ],
)
def test_select(where, expected):
    batch = (np.arange(4), {"names": ["a", "b", "c", "d"], "rate": 0.5})
    np.testing.assert_equal(batches.select(batch, where), expected)


def test_a_named_tuple_stays_one():
    assert batches.cut(Pair(np.arange(3), "same"), 2)[0]._fields == ("left", "right")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (np.zeros((4, 2), np.float32), "ndarray(4, 2)"),
        ({"x": np.zeros(3), "y": [1, 2, 3]}, "{'x': ndarray(3,), 'y': list of 3}"),
        ((1, "a", None), "(int, str, NoneType)"),
        (np.float64(2), "float64()"),
    ],
)
def test_describe(batch, expected):
    assert batches.describe(batch) == expected


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (1, "text"),
            "The batch (int, str) has no array with examples on its first axis. "
            f"Use (inputs, targets), or write an objective:\n{batches.OBJECTIVE_EXAMPLE}",
        ),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(4)},
            "The arrays of a batch have different lengths, 3, 4, "
            "in {'x': ndarray(3, 2), 'y': ndarray(4,)}. Use arrays with one entry per example.",
        ),
        (
            (np.zeros((0, 2)), []),
            "The batch (ndarray(0, 2), list of 0) has no examples. Leave empty batches out.",
        ),
    ],
)
def test_batches_without_examples_are_refused(batch, message):
    for function in (batches.count, lambda batch: batches.cut(batch, 2)):
        with pytest.raises(BatchError) as caught:
            function(batch)
        assert str(caught.value) == message


def test_the_example_of_an_objective_is_python():
    compile("def f():" + batches.OBJECTIVE_EXAMPLE, "example", "exec")


BATCH = (np.arange(6.0).reshape(3, 2), ["a", "b", "c"], 0.5)


@pytest.mark.parametrize(
    "other",
    [
        (BATCH[0] + [0, 1], *BATCH[1:]),
        (BATCH[0].astype("float32"), *BATCH[1:]),
        (BATCH[0].reshape(2, 3), *BATCH[1:]),
        (BATCH[0], ["a", "b", "d"], 0.5),
        (*BATCH[:2], 0.25),
    ],
)
def test_different_batches_have_different_fingerprints(other):
    assert batches.fingerprint(BATCH) == batches.fingerprint((BATCH[0].copy(), list("abc"), 0.5))
    assert batches.fingerprint(other) != batches.fingerprint(BATCH)


# -- rows: a batch by reference


class Told:
    def __init__(self, fingerprint):
        self.fingerprint = fingerprint


ROWS = batches.Rows(Told(1), epoch=2, batch=3, num_examples=10)


@given(st.integers(1, 40), st.integers(1, 12))
def test_rows_are_split_like_any_batch(num_examples, num_shards):
    rows = batches.Rows(None, 0, 0, num_examples)
    assert batches.count(rows) == num_examples
    arrays = batches.cut(np.arange(num_examples), num_shards)
    pieces = batches.cut(rows, num_shards)
    assert [None if piece is None else piece.bounds for piece in pieces] == [
        None if array is None else (array[0], array[-1] + 1) for array in arrays
    ]


def test_rows_are_assigned_like_any_batch():
    (first, second) = batches.deal(ROWS, Plan.even(4, range(2)), [[0], [1]])
    assert {shard: piece.bounds for shard, piece in (first[0] | second[1]).items()} == {
        0: (0, 3),
        1: (3, 6),
        2: (6, 8),
        3: (8, 10),
    }


def test_describe_rows():
    assert batches.describe(batches.cut(ROWS, 4)[1]) == "rows 3 to 5 of 10 in batch 3 of epoch 2"


def test_rows_of_inputs_only():
    assert batches.inputs(ROWS).only_inputs
    assert batches.restore_tuples(ROWS) is ROWS


@pytest.mark.parametrize(
    "other",
    [
        replace(ROWS, epoch=1),
        replace(ROWS, batch=4),
        replace(ROWS, num_examples=9),
        replace(ROWS, num_shards=2),
        replace(ROWS, pipeline=Told(2)),
    ],
)
def test_different_rows_have_different_fingerprints(other):
    assert batches.fingerprint((ROWS, 1)) == batches.fingerprint((replace(ROWS, pipeline=Told(1)), 1))
    assert batches.fingerprint((other, 1)) != batches.fingerprint((ROWS, 1))


FOUR = [np.zeros(4), np.ones(4), np.ones(4)]


@pytest.mark.parametrize(
    ("batch", "together"),
    [
        ((FOUR, np.zeros(4)), True),
        ((FOUR, [0, 1, 0, 1]), True),  # a plain list has an entry for every example too
        ({"x": FOUR, "y": np.zeros(4)}, True),
        ((FOUR, np.zeros(3)), False),  # three examples of four numbers each
        ((FOUR, [0, 1, 0]), False),
        (({"image": FOUR},), False),  # nothing beside it tells
        ((FOUR, FOUR), False),
        (([np.zeros(4), np.ones(3)], np.zeros(4)), False),
    ],
)
def test_a_list_is_several_inputs_if_an_array_beside_it_has_the_same_length(batch, together):
    first = next(iter(batch.values() if isinstance(batch, dict) else batch))
    found = batches.several(batch)
    given = next(iter(found.values() if isinstance(found, dict) else found))
    assert isinstance(given, tuple) == together
    assert together or given is first


@pytest.mark.parametrize("batch", [(FOUR, FOUR), (FOUR, np.zeros(3)), {"x": FOUR}])
def test_a_list_of_arrays_is_always_several_inputs_in_keras(batch):
    found = batches.several(batch, always=True)
    given = list(found.values() if isinstance(found, dict) else found)
    assert isinstance(given[0], tuple)
    assert isinstance(given[-1], tuple | np.ndarray)
    np.testing.assert_equal(given[0], tuple(FOUR))


def test_a_list_of_other_values_has_one_entry_per_example():
    batch = (["a", "b"], [1, 2], [np.zeros(2), 1], [])
    assert batches.several(batch, always=True) is batch
