"""Generators of the scripts own, in functions and data sets: seeded for each example, or refused."""

import numpy as np
import pytest

from data.kit import FLAT, IMAGES, LABELS, epoch, fitted
from lockstep.data import arrays, indexed
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
def test_generators_of_the_scripts_own_follow_from_the_seed(make, workers):
    pipeline = make().map(lambda x, y: (x.astype("float32"), y), workers=workers).batch(8)
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state
    expected = inputs(epoch(pipeline, 1))
    RNG.normal()
    assert inputs(epoch(pipeline, 1, num_shards=3)) == expected
    assert inputs(epoch(pipeline, 2)) != expected
    assert fitted(pipeline, 1) == fitted(pipeline, 2) == fitted(pipeline, 3)


@pytest.mark.parametrize("draw", [lambda: RNG.normal(), lambda: np.random.default_rng().normal()])
def test_a_function_that_draws_from_them_without_saying_so_is_refused(draw):
    for pipeline in (
        arrays(FLAT).map(lambda x: x + draw()).batch(8),
        arrays(FLAT).batch(8).map(lambda x: x + draw()),
    ):
        with pytest.raises(ExactError, match=r"one that it holds, or a new one without a seed\. Write \.map\(f, ran"):
            list(pipeline)
