"""Where batches come from: every example once an epoch, in an order of (seed, epoch)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.batches import OBJECTIVE_EXAMPLE
from lockstep.data import ArraySource, IterableSource, source
from lockstep.errors import BatchError


def rows(source, epoch=0):
    return [batch[0].tolist() for batch in source.epoch(epoch)]


@given(st.integers(1, 60), st.integers(1, 70), st.booleans(), st.integers(0, 9))
def test_an_epoch_holds_every_example_once(num_examples, batch_size, shuffle, epoch):
    numbers = np.arange(num_examples)
    arrays = ArraySource((numbers, {"same": numbers * 10}), batch_size, shuffle, seed=3)
    seen = list(arrays.epoch(epoch))
    assert arrays.num_examples == num_examples
    assert arrays.num_steps == len(seen)
    assert [len(batch[0]) for batch in seen[:-1]] == [batch_size] * (len(seen) - 1)
    joined = np.concatenate([batch[0] for batch in seen])
    assert sorted(joined) == list(range(num_examples))
    assert shuffle or joined.tolist() == list(range(num_examples))
    assert all((batch[1]["same"] == batch[0] * 10).all() for batch in seen)  # rows stay together


def test_the_order_is_one_of_seed_and_epoch():
    data = (np.arange(40),)
    first = ArraySource(data, 7, True, seed=0)
    assert rows(first, 1) == rows(ArraySource(data, 7, True, seed=0), 1)
    assert rows(first, 0) != rows(first, 1)
    assert rows(first, 0) != rows(ArraySource(data, 7, True, seed=1), 0)


def test_iterables_are_read_as_they_are():
    batches = [(np.zeros(2), np.ones(2)), [np.zeros(3), np.ones(3)]]
    listed = IterableSource(batches)
    assert listed.num_steps == 2
    assert [[type(batch) for batch in listed.epoch(epoch)] for epoch in (0, 1)] == [[tuple, tuple]] * 2
    assert IterableSource(iter(batches)).num_steps is None


def test_a_generator_that_is_used_up():
    once = IterableSource(iter([np.zeros(2)]))
    assert len(list(once.epoch(0))) == 1
    with pytest.raises(BatchError) as caught:
        list(once.epoch(1))
    assert str(caught.value) == (
        "An epoch holds at least one batch. The generator was used up before epoch 2. "
        "Give a list, a loader or arrays, or use epochs=1 or steps_per_epoch."
    )


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (np.zeros((3, 2)), ArraySource),
        ((np.zeros(3), np.zeros(3)), ArraySource),
        ({"x": np.zeros(3)}, ArraySource),
        ([np.zeros(3)], IterableSource),
        (iter([np.zeros(3)]), IterableSource),
    ],
)
def test_the_source_of_what_kind_of_data(data, kind):
    assert isinstance(source.of(data, 2, False, 0), kind)


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (
            3,
            2,
            "Data is (inputs, targets), a nest of arrays, a data set, a loader or an iterable of batches. "
            "Got int. Give fit((x, y), ...).",
        ),
        (
            "text",
            2,
            "Data is (inputs, targets), a nest of arrays, a data set, a loader or an iterable of batches. "
            "Got str. Give fit((x, y), ...).",
        ),
        (
            (np.zeros(3), np.zeros(2)),
            2,
            "Every array of a batch has one entry per example. Got lengths 3, 2 in (ndarray(3,), ndarray(2,)). "
            "Give arrays of equal length.",
        ),
        (
            (1, 2),
            2,
            "A batch holds at least one array whose first axis counts the examples. Got (int, int). "
            f"Give (inputs, targets), or write an objective:\n{OBJECTIVE_EXAMPLE}",
        ),
    ],
)
def test_errors(data, batch_size, message):
    with pytest.raises(BatchError) as caught:
        source.of(data, batch_size, False, 0)
    assert str(caught.value) == message
