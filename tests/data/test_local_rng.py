"""Generators that functions and data sets hold: seeded for each example, or refused."""

import numpy as np
import pytest

from data.pipelines import FLAT, IMAGES, LABELS, epoch, fitted
from lockstep.data import arrays, indexed, source, stream
from lockstep.errors import ExactError

RNG = np.random.default_rng(0)


def shifted(image, label):
    """Draws from a generator that it holds and from one that it makes."""
    return FLAT[label] + RNG.normal(size=16) + np.random.default_rng().normal(size=16), label


class Noisy:
    """A data set with a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return (FLAT[index] + self.rng.normal(size=16)).astype("float32"), LABELS[index]


def inputs(batches):
    """The bytes of all inputs, in order."""
    return b"".join(batch[0].tobytes() for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make", [lambda: arrays(IMAGES, LABELS).map(shifted, random=True), lambda: indexed(Noisy())], ids=["map", "dataset"]
)
def test_held_generators_follow_from_the_seed(make, workers):
    pipeline = make().map(lambda x, y: (x.astype("float32"), y), workers=workers).batch(8)
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state
    expected = inputs(epoch(pipeline, 1))
    RNG.normal()
    assert inputs(epoch(pipeline, 1, num_shards=3)) == expected
    assert inputs(epoch(pipeline, 2)) != expected
    assert fitted(pipeline, 1) == fitted(pipeline, 3)


@pytest.mark.parametrize("draw", [lambda: RNG.normal(), lambda: np.random.default_rng().normal()])
def test_drawing_without_random_true_is_refused(draw):
    for pipeline in (
        arrays(FLAT).map(lambda x: x + draw()).batch(8),
        arrays(FLAT).batch(8).map(lambda x: x + draw()),
    ):
        with pytest.raises(
            ExactError, match=r"refers to, or a new generator without a seed, .* Write \.map\(f, random=True\)"
        ):
            list(pipeline)


class Drawing:
    """A stream that draws from a generator of its own, from a new one, and from the process's."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        fresh = np.random.default_rng()
        for index in range(37):
            noise = self.rng.normal(size=16) + fresh.normal(size=16) + np.random.normal(size=16)
            yield (FLAT[index] + noise).astype("float32"), LABELS[index]


def test_draws_of_a_stream_follow_from_seed_and_epoch():
    def inputs_of(data, index, seed=0, start=0):
        return inputs(source.open_source(stream(data).batch(8), 8, False, seed).epoch(index, start))

    first, used = Drawing(), Drawing()
    before = inputs_of(used, 0)
    assert before == inputs_of(first, 0)
    np.random.normal()
    expected = inputs_of(used, 1)
    assert inputs_of(Drawing(), 1) == expected
    assert expected.endswith(inputs_of(Drawing(), 1, start=2))
    assert len({before, expected, inputs_of(Drawing(), 0, seed=1)}) == 3
    assert fitted(stream(Drawing()).batch(8), 1) == fitted(stream(Drawing()).batch(8), 2)


def test_a_stream_does_not_change_the_scripts_generators():
    before = np.random.get_state()[1].copy()
    list(stream(Drawing()).batch(8))
    assert (np.random.get_state()[1] == before).all()
