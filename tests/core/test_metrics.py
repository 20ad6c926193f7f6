"""Sums first, one division last."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import metrics
from lockstep.core.metrics import Column, Metric, resolve
from lockstep.errors import ModelError


def hits(outputs, targets):
    return outputs == targets


class Distance:
    def __call__(self, outputs, targets):
        return abs(outputs - targets)


def total(sums):
    return sums.sum()


NAMED = {"accuracy": hits, "mse": hits}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["accuracy"], [Metric(hits, name="accuracy")]),
        ([hits], [Metric(hits, name="hits")]),
        ([Metric(hits, total)], [Metric(hits, total, "hits")]),
        ([Metric(hits, total, "sum")], [Metric(hits, total, "sum")]),
        ({"right": "accuracy", "own": hits}, [Metric(hits, name="right"), Metric(hits, name="own")]),
        ({"renamed": Metric(hits, total, "sum")}, [Metric(hits, total, "renamed")]),
        (("accuracy", "mse"), [Metric(hits, name="accuracy"), Metric(hits, name="mse")]),
    ],
)
def test_resolve(given, expected):
    assert resolve(given, NAMED) == expected


def test_a_callable_without_a_name_takes_its_types():
    assert resolve([Distance()], NAMED)[0].name == "Distance"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: resolve(["acuracy"], NAMED),
            "There is no metric named 'acuracy'. Use one of accuracy, mse, a function of (outputs, targets), or a "
            "lockstep.Metric.",
        ),
        (
            lambda: resolve([3], NAMED),
            "A metric must be a name, a function or a lockstep.Metric. Got 3. Use for example 'accuracy'.",
        ),
        (
            lambda: resolve([hits, hits], NAMED),
            "Metric names must be unique, and none may be 'loss'. Got ['hits', 'hits']. Rename a metric with "
            "metrics={'name': metric, ...}.",
        ),
        (
            lambda: resolve({"loss": hits}, NAMED),
            "Metric names must be unique, and none may be 'loss'. Got ['loss']. Rename a metric with "
            "metrics={'name': metric, ...}.",
        ),
        (
            lambda: Metric(3, len),
            f"sums and result of a Metric must be functions. Got sums=3 and result={len!r}. Write for example "
            "Metric(sums=f, result=g).",
        ),
        (
            lambda: Metric(len, 3),
            f"sums and result of a Metric must be functions. Got sums={len!r} and result=3. Write for example "
            "Metric(sums=f, result=g).",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ModelError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sums", "loss", "divisor"),
    [
        ([6.0, 4.0, 0.0], 1.5, 1.0),  # shares applied beforehand
        ([6.0, 4.0, 2.0], 1.5, 4.0),  # two shards summed
        ([6.0, 0.0, 0.0], 6.0, 1.0),  # reduction="sum"
        ([0.0, 0.0, 3.0], math.nan, 0.0),  # every target ignored
    ],
)
def test_loss_and_divisor(sums, loss, divisor):
    np.testing.assert_equal(metrics.loss(np.array(sums)), loss)
    assert metrics.divisor(np.array(sums)) == divisor


@pytest.mark.parametrize(("pair", "expected"), [([3.0, 4.0], 0.75), ([0.0, 4.0], 0.0), ([0.0, 0.0], math.nan)])
def test_ratio(pair, expected):
    np.testing.assert_equal(metrics.ratio(np.array(pair)), expected)


def test_results_read_every_column_at_its_place():
    columns = [Column("accuracy", 2), Column("confusion", 3, lambda sums: sums[2] - sums[0]), Column("mae", 2)]
    sums = np.array([8.0, 4.0, 0.0, 3.0, 4.0, 10.0, 20.0, 30.0, 5.0, 2.0, 99.0])  # room may be left at the end
    assert metrics.results(sums, columns) == {"loss": 2.0, "accuracy": 0.75, "confusion": 20.0, "mae": 2.5}


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=5), min_size=1, max_size=8))
def test_sums_of_uneven_shards_give_the_mean_over_examples(shards):
    pairs = [np.array([float(sum(shard)), float(len(shard))]) for shard in shards]
    examples = [value for shard in shards for value in shard]
    assert metrics.ratio(sum(pairs[1:], pairs[0])) == pytest.approx(np.mean(examples), abs=1e-12)
