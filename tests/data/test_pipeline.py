"""Pipelines: the batches they yield, and steps that cannot be combined."""

import numpy as np
import pytest

from data.pipelines import IMAGES, LABELS, Pairs, epoch, flat
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
        (
            lambda: arrays(TEN).take(3).repeat().batch(4).take(2),
            [[0, 1, 2, 0], [1, 2, 0, 1]],
        ),  # batches continue over epochs
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
def test_the_batches_of_a_pipeline(pipeline, batches):
    assert lists(pipeline()) == batches


def test_a_pipeline_without_batch_yields_examples():
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
def test_pytrees(nest, expected):
    np.testing.assert_equal(next(iter(arrays(nest).batch(2))), expected)


def test_writing_to_a_batch_does_not_change_the_data():
    own = np.arange(4)
    for batch in arrays(own).batch(2):
        batch += 1
    for batch in arrays(own).map(lambda x: np.add(x, 1)).batch(2).map(lambda x: np.add(x, 1, out=x)):
        batch += 1
    assert own.tolist() == [0, 1, 2, 3]


def test_every_step_returns_a_new_pipeline_and_starts_nothing():
    def explodes(*_):
        raise AssertionError

    first = indexed(Pairs())
    second = first.shuffle(1).map(explodes, random=True, workers=3).batch(4).cache("/nowhere/at/all").prefetch(2)
    assert first.steps == ()
    assert repr(second.repeat().take(3)) == "<lockstep.data indexed.shuffle.map.batch.cache.prefetch.repeat.take>"
    with pytest.raises(AttributeError):
        second.input = None


def test_epochs_draw_different_numbers_and_are_reproducible():
    drawn = indexed(Pairs()).batch(8)  # in one order, so that only the draws differ
    assert flat(epoch(drawn, 0)) == flat(epoch(drawn, 0)) == flat(drawn)
    assert flat(epoch(drawn, 0)) != flat(epoch(drawn, 1))


def test_shards_are_parts_of_the_batch():
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
            (
                "A stream has no index, so .shuffle is not supported. Use lockstep.data.indexed, or shuffle the "
                "iterable yourself."
            ),
        ),
        (
            lambda: arrays(TEN).batch(2).shuffle(),
            ".shuffle after .batch is not supported. Put .shuffle before .batch.",
        ),
        (
            lambda: arrays(TEN).repeat().shuffle(),
            ".shuffle after .repeat is not supported. Put .shuffle before .repeat.",
        ),
        (
            lambda: arrays(TEN).batch(2).map(abs, random=True),
            ".map(f, random=True) after .batch is not supported, because random numbers are seeded for each "
            "example. Put this .map before .batch.",
        ),
        (
            lambda: arrays(TEN).batch(2).batch(3),
            ".batch(3) after .batch is not supported. Leave one of the two out.",
        ),
        (
            lambda: arrays(TEN).repeat().repeat(),
            (
                ".repeat twice is not supported, because one .repeat already repeats without end. Leave one of "
                "the two out."
            ),
        ),
        (
            lambda: stream([1]).cache(),
            "A stream has no length, so it cannot be cached. Use lockstep.data.indexed.",
        ),
        (lambda: arrays(TEN).batch(0), "batch=0 must be an integer, 1 or more. Use for example batch=1."),
        (lambda: arrays(TEN).take(2.5), "take=2.5 must be an integer, 1 or more. Use for example take=1."),
        (
            lambda: arrays(TEN).prefetch(0),
            "prefetch=0 must be an integer from 1 to 1000. Use for example prefetch=1.",
        ),
        (lambda: arrays(TEN).shuffle("a"), "seed='a' must be an integer. Use for example seed=1."),
        (
            lambda: indexed(TEN, workers=-1),
            "workers=-1 must be an integer, 0 or more. Use for example workers=1.",
        ),
        (lambda: arrays(), "lockstep.data.arrays() needs at least one array. Write lockstep.data.arrays(x, y)."),
        (
            lambda: indexed(iter([1])),
            "lockstep.data.indexed needs an object with __len__ and __getitem__, but list_iterator does not have both "
            "methods. Define both, or use lockstep.data.stream for examples without an index.",
        ),
        (
            lambda: list(arrays(TEN).batch(11, drop_last=True)),
            "The epoch has no batch, because .batch(11, drop_last=True) drops all of its 10 examples. Use a smaller "
            "batch size, or drop_last=False.",
        ),
        (
            lambda: list(indexed([]).batch(2)),
            "The data set is an empty list. Use a data set with examples.",
        ),
        (
            lambda: list(indexed(Pairs(), workers=0).batch(2).prefetch(1)),
            "workers=0 cannot be used with .prefetch in this pipeline, because Python code computes its examples: the "
            "code would run in a thread beside training, and both would draw from the same process-wide random number "
            "generators. Use workers=1 or more, or leave .prefetch out.",
        ),
        (
            lambda: list(stream([]).repeat().batch(2).take(3)),
            "The stream before .repeat gives no examples, or fewer than one full batch of .batch(..., drop_last=True). "
            "Use a non-empty iterable, not a generator that was read before; or drop_last=False.",
        ),
        (
            lambda: list(stream([1]).batch(2, drop_last=True).repeat().take(3)),
            "The stream before .repeat gives no examples, or fewer than one full batch of .batch(..., drop_last=True). "
            "Use a non-empty iterable, not a generator that was read before; or drop_last=False.",
        ),
        (
            lambda: list(stream(iter([1, 2])).repeat().batch(2).take(3)),
            "The stream before .repeat gives no examples in repetition 2; a generator, for example, can be read only "
            "once. Use a list, or an object whose __iter__ starts from the first example.",
        ),
        (
            lambda: list(arrays(TEN, np.array([None] * 10)).batch(2)),
            "lockstep.data.arrays needs arrays with an axis 0 and with elements of fixed size. Got ndarray, an array "
            "of object of shape (10,). Use numbers, booleans or fixed-size strings, or lockstep.data.indexed.",
        ),
        (
            lambda: list(arrays(TEN).batch(4).map(lambda x: x[:2])),
            "A function given to .map after .batch returned ndarray(2,) for 4 examples. Return as many "
            "examples as the function was given, or use .map before .batch.",
        ),
    ],
)
def test_steps_that_cannot_be_combined_are_refused(build, message):
    refused(build, message)
