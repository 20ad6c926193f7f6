"""Chains: what they give, and what cannot be chained."""

import numpy as np
import pytest

from data.kit import IMAGES, LABELS, Pairs, epoch, flat
from lockstep.core.permutation import order
from lockstep.data import arrays, indexed, stream
from lockstep.errors import BatchError

TEN = np.arange(10)
SHUFFLED = order(3, 0, 10).between(0, 10).tolist()


def lists(pipeline):
    return [batch.tolist() for batch in pipeline]


@pytest.mark.parametrize(
    ("pipeline", "batches"),
    [
        (lambda: arrays(TEN).batch(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (lambda: arrays(TEN).batch(4, drop_last=True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda: arrays(TEN).batch(4).take(1), [[0, 1, 2, 3]]),
        (lambda: arrays(TEN).take(5).batch(4), [[0, 1, 2, 3], [4]]),
        (lambda: arrays(TEN).shuffle(3).batch(5), [SHUFFLED[:5], SHUFFLED[5:]]),
        (lambda: arrays(TEN).shuffle(3).take(3).batch(5), [SHUFFLED[:3]]),
        (lambda: arrays(TEN).take(3).repeat().batch(4).take(2), [[0, 1, 2, 0], [1, 2, 0, 1]]),  # batches run on
        (
            lambda: arrays(TEN).take(3).batch(2).repeat().take(4),
            [[0, 1], [2], [0, 1], [2]],
        ),  # batches end with an epoch
        (lambda: arrays(TEN).map(lambda x: x * 10).batch(5), [[0, 10, 20, 30, 40], [50, 60, 70, 80, 90]]),
        (lambda: arrays(TEN).batch(5).map(lambda x: x * 10), [[0, 10, 20, 30, 40], [50, 60, 70, 80, 90]]),
        (lambda: arrays(TEN).map(lambda x: x + 1).batch(9).map(lambda x: x * 10), [[*range(10, 100, 10)], [100]]),
        (lambda: arrays(TEN).map(lambda x: x + 1).cache().map(lambda x: -x).take(2).batch(2), [[-1, -2]]),
        (lambda: arrays(TEN).shuffle(3).map(lambda x: x + 1).cache().batch(10), [[each + 1 for each in SHUFFLED]]),
        (lambda: arrays(TEN).cache().shuffle(3).batch(10), [SHUFFLED]),
        (lambda: arrays(TEN).batch(5).cache().prefetch(2), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (lambda: indexed(range(4)).batch(3), [[0, 1, 2], [3]]),
        (lambda: indexed(range(10)).shuffle(3).batch(10), [SHUFFLED]),
        (lambda: stream(range(5)).batch(2), [[0, 1], [2, 3], [4]]),
        (lambda: stream(range(5)).batch(2, drop_last=True), [[0, 1], [2, 3]]),
        (lambda: stream(range(5)).take(3).batch(2), [[0, 1], [2]]),
        (lambda: stream(range(3)).repeat().batch(2).take(3), [[0, 1], [2, 0], [1, 2]]),
        (lambda: stream(range(3)).batch(2).repeat().take(3), [[0, 1], [2], [0, 1]]),
        (lambda: stream(range(9)).take(3).repeat().take(8).batch(4), [[0, 1, 2, 0], [1, 2, 0, 1]]),
        (lambda: stream(range(9)).batch(2).take(2).repeat().take(3), [[0, 1], [2, 3], [0, 1]]),
        (lambda: stream(range(5)).map(lambda x: x * 2).batch(3).map(lambda x: x + 1), [[1, 3, 5], [7, 9]]),
        (lambda: stream(iter(range(3))).batch(2), [[0, 1], [2]]),
    ],
)
def test_what_a_chain_gives(pipeline, batches):
    assert lists(pipeline()) == batches


def test_examples_where_there_is_no_batch():
    assert list(arrays(TEN).take(3)) == [0, 1, 2]
    assert [(image.shape, int(label)) for image, label in arrays(IMAGES, LABELS).take(2)] == [
        ((6, 6), LABELS[0]),
        ((6, 6), LABELS[1]),
    ]
    assert list(stream("ab")) == ["a", "b"]


@pytest.mark.parametrize(
    ("nest", "expected"),
    [
        ((TEN, -TEN), (TEN[:2], -TEN[:2])),
        ({"x": TEN, "y": (-TEN, [*"abcdefghij"])}, {"x": TEN[:2], "y": (-TEN[:2], ["a", "b"])}),
        ((TEN, 0.5), (TEN[:2], 0.5)),
    ],
)
def test_nests(nest, expected):
    np.testing.assert_equal(next(iter(arrays(nest).batch(2))), expected)


def test_what_is_given_out_is_ones_own():
    own = np.arange(4)
    for batch in arrays(own).batch(2):
        batch += 1
    for batch in arrays(own).map(lambda x: np.add(x, 1)).batch(2).map(lambda x: np.add(x, 1, out=x)):
        batch += 1
    assert own.tolist() == [0, 1, 2, 3]


def test_every_step_gives_a_new_value_and_starts_nothing():
    def explodes(*_):
        raise AssertionError

    first = indexed(Pairs())
    second = first.shuffle(1).map(explodes, random=True, workers=3).batch(4).cache("/nowhere/at/all").prefetch(2)
    assert first.steps == ()
    assert repr(second.repeat().take(3)) == "<lockstep.data indexed.shuffle.map.batch.cache.prefetch.repeat.take>"
    with pytest.raises(AttributeError):
        second.base = None


def test_epochs_draw_anew_and_are_the_same_again():
    drawn = indexed(Pairs()).batch(8)  # in one order, so that only the draws differ
    assert flat(epoch(drawn, 0)) == flat(epoch(drawn, 0)) == flat(drawn)
    assert flat(epoch(drawn, 0)) != flat(epoch(drawn, 1))


def test_pieces_are_parts_of_the_batch():
    drawn = indexed(Pairs()).shuffle(1).batch(8)
    whole, cut = epoch(drawn, 1), epoch(drawn, 1, num_shards=3)
    for place in (0, 1):
        assert np.array_equal(*(np.concatenate([each[place] for each in pieces]) for pieces in (whole, cut)))


def refused(build, message):
    with pytest.raises(BatchError) as caught:
        build()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: stream([1]).shuffle(),
            "Examples are shuffled by index. A stream has none. Use lockstep.data.indexed.",
        ),
        (
            lambda: arrays(TEN).batch(2).shuffle(),
            "Examples are shuffled, epoch by epoch. Got .shuffle after .batch. Write it before.",
        ),
        (
            lambda: arrays(TEN).repeat().shuffle(),
            "Examples are shuffled, epoch by epoch. Got .shuffle after .repeat. Write it before.",
        ),
        (
            lambda: arrays(TEN).batch(2).map(abs, random=True),
            "What is drawn for an example follows from its index, so it is drawn one by one. "
            "Got .map(f, random=True) after .batch. Write it before .batch.",
        ),
        (
            lambda: arrays(TEN).batch(2).batch(3),
            "A pipeline is batched once. Got .batch(3) after .batch. Leave one out.",
        ),
        (
            lambda: arrays(TEN).repeat().repeat(),
            "A pipeline is repeated once, without end. Got .repeat twice. Leave one out.",
        ),
        (
            lambda: stream([1]).cache(),
            "A cache has a row for every example. A stream has no length. Use lockstep.data.indexed.",
        ),
        (lambda: arrays(TEN).batch(0), "batch takes a whole number from 1 on. Got 0. Use for example batch=1."),
        (lambda: arrays(TEN).take(2.5), "take takes a whole number from 1 on. Got 2.5. Use for example take=1."),
        (
            lambda: arrays(TEN).prefetch(0),
            "prefetch takes a whole number from 1 to 1000. Got 0. Use for example prefetch=1.",
        ),
        (lambda: arrays(TEN).shuffle("a"), "seed takes a whole number. Got 'a'. Use for example seed=1."),
        (
            lambda: indexed(TEN, workers=-1),
            "workers takes a whole number from 0 on. Got -1. Use for example workers=1.",
        ),
        (lambda: arrays(), "A pipeline begins with arrays. Got none. Write lockstep.data.arrays(x, y)."),
        (
            lambda: indexed(iter([1])),
            "A data set has __len__ and __getitem__. Got list_iterator. "
            "Write them, or use lockstep.data.stream for examples without an index.",
        ),
        (
            lambda: list(arrays(TEN).batch(11, drop_last=True)),
            "An epoch holds at least one batch. Got 10 examples for batches of 11 with drop_last=True. "
            "Use smaller batches, or drop_last=False.",
        ),
        (
            lambda: list(indexed([]).batch(2)),
            "A data set holds at least one example. Got list of length 0.",
        ),
        (
            lambda: list(indexed(Pairs(), workers=0).batch(2).prefetch(1)),
            "Python work ahead of time happens in reader processes, for a process has one set of random generators, "
            "which a thread beside a computing one may not touch. Got workers=0 with .prefetch. "
            "Write workers=1 or more, or leave .prefetch out.",
        ),
        (
            lambda: list(stream(iter([1, 2])).repeat().batch(2).take(3)),
            "A stream that is repeated can be read again. This one had nothing in round 2: a generator can be read "
            "once. Give a list, or an object whose __iter__ begins anew.",
        ),
        (
            lambda: list(arrays(TEN, np.array([None] * 10)).batch(2)),
            "An array of examples has an axis to count them and a type of fixed size. Got object of shape (10,) in "
            "ndarray. Give numbers, booleans or fixed-size strings, or use lockstep.data.indexed.",
        ),
        (
            lambda: list(arrays(TEN).batch(4).map(lambda x: x[:2])),
            "A function after .batch gives back as many examples as it got. Got ndarray(2,) for 4.",
        ),
    ],
)
def test_what_cannot_be_chained(build, message):
    refused(build, message)
