"""Permutations: complete, uniform, reproducible, and computed in parts."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import permutation
from lockstep.core.permutation import Permutation, order

keys = st.integers(0, 2**62)


@given(keys, st.integers(1, 3000))
def test_every_number_occurs_once(key, num_examples):
    found = Permutation(key, num_examples).at(np.arange(num_examples))
    assert found.dtype == np.int64
    assert sorted(found) == list(range(num_examples))


@pytest.mark.parametrize("num_examples", [1, 2, 3, 4, 5, 255, 256, 257, 4095, 4096, 4097, 10_000, 65_537])
def test_every_number_occurs_once_at_edge_sizes(num_examples):
    found = Permutation(3, num_examples).between(0, num_examples)
    assert np.array_equal(np.sort(found), np.arange(num_examples))


@given(keys, st.integers(1, 20_000), st.data())
def test_ranges_are_parts_of_the_whole_permutation(key, num_examples, data):
    whole = Permutation(key, num_examples).at(np.arange(num_examples))
    start = data.draw(st.integers(0, num_examples))
    stop = data.draw(st.integers(start, num_examples))
    shuffled = Permutation(key, num_examples)
    assert shuffled.between(start, stop).tolist() == whole[start:stop].tolist()
    positions = np.array(data.draw(st.lists(st.integers(0, num_examples - 1), max_size=20)), np.int64)
    assert shuffled.at(positions).tolist() == whole[positions].tolist()


def test_a_permutation_of_a_trillion_needs_no_list():
    positions = np.random.default_rng(0).integers(0, 10**12, 100_000)
    found = Permutation(1, 10**12).at(positions)
    assert found.min() >= 0
    assert found.max() < 10**12
    assert len(np.unique(found)) == len(np.unique(positions))
    assert abs(np.corrcoef(positions, found)[0, 1]) < 0.02


def deviation(counts, expected):
    """Chi-square for each degree of freedom: about 1 where all are equally likely."""
    counts = np.asarray(counts, float)
    return float(((counts - expected) ** 2 / expected).sum() / (len(counts) - 1))


@pytest.mark.parametrize("num_examples", [3, 4, 5])
def test_all_orders_of_a_few_numbers_are_equally_likely(num_examples):
    many = 60 * math.factorial(num_examples)
    found = Counter(tuple(Permutation(key, num_examples).at(np.arange(num_examples)).tolist()) for key in range(many))
    assert len(found) == math.factorial(num_examples)
    assert deviation(list(found.values()), 60) < 1.8


@pytest.mark.parametrize("num_examples", [10, 100, 1000, 5000])
def test_larger_permutations_have_no_pattern(num_examples):
    """Against numpy's own permutations: where a position lands, and how far apart neighbours land."""
    keys, shown = 1500, min(num_examples, 60)
    ours = np.stack([Permutation(key, num_examples).at(np.arange(shown)) for key in range(keys)])
    generator = np.random.default_rng(0)
    theirs = np.stack([generator.permutation(num_examples)[:shown] for _ in range(keys)])

    def measured(orders):
        tenths = [np.bincount(column * 10 // num_examples, minlength=10) for column in orders.T]
        steps = (orders[:, 1:] - orders[:, :-1]) % num_examples
        alike = float((steps[:, 1:] == steps[:, :-1]).mean() * num_examples)
        low = np.corrcoef(orders[:, :-1].ravel() & 1, orders[:, 1:].ravel() & 1)[0, 1]
        return [float(np.mean([deviation(column, keys / 10) for column in tenths])), alike, 10 * float(low)]

    assert measured(ours) == pytest.approx(measured(theirs), abs=0.3)


def test_epochs_and_seeds_have_different_orders():
    orders = [order(seed, epoch, 50).between(0, 50).tobytes() for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_recorded_orders():
    """Written down once: a version that draws otherwise would break every saved run."""
    assert order(0, 0, 10).between(0, 10).tolist() == [1, 2, 4, 6, 7, 3, 5, 9, 0, 8]
    assert Permutation(0, 10**6).at(np.arange(3)).tolist() == [554178, 294602, 384180]


def test_the_last_chunk_is_stored(monkeypatch):
    calls = []
    real = Permutation.at
    monkeypatch.setattr(Permutation, "at", lambda self, positions: calls.append(1) or real(self, positions))
    shuffled = Permutation(0, 3 * permutation._CHUNK)
    for start in range(0, 3 * permutation._CHUNK, 64):
        shuffled.between(start, start + 64)
    assert len(calls) == 3
