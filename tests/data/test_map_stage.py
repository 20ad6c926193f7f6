"""Map stages: seeded for each example, unannounced draws refused, failures named."""

import random
import sys

import numpy as np
import pytest
import torch

from data.pipelines import IMAGES, LABELS, WithoutSeven, augmented, epoch, flat, refuses_seven
from lockstep.data import arrays, indexed, stream
from lockstep.errors import BatchError, ExactError, ExampleError

TEN = np.arange(10)
DRAWS = {
    "random": lambda x: x + random.random(),
    "numpy": lambda x: x + np.random.rand(),
    "torch": lambda x: x + torch.rand(1).item(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_follow_from_seed_epoch_and_index(draw):
    pipeline = arrays(TEN).shuffle(4).map(draw, random=True)
    by_index = dict(zip((int(x) for x in arrays(TEN).shuffle(4)), pipeline, strict=True))
    cut = {int(x): x for x in np.concatenate(epoch(pipeline.batch(7), 0, num_shards=3))}
    assert sorted(by_index.values()) == sorted(cut.values())
    assert len({value % 1 for value in by_index.values()}) == 10
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    script = random.random(), np.random.rand(), torch.rand(1)
    assert flat(pipeline.batch(3)) == flat(pipeline.batch(3))
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    flat(pipeline.batch(3))
    assert (random.random(), np.random.rand(), torch.rand(1)) == script
    assert flat(arrays(TEN).shuffle(5).map(draw, random=True).batch(10)) != flat(pipeline.batch(10))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("after", [False, True])
def test_a_draw_without_random_true_is_refused(draw, after):
    pipeline = arrays(TEN).batch(5).map(draw) if after else arrays(TEN).map(draw).batch(5)
    with pytest.raises(ExactError) as caught:
        list(pipeline)
    assert str(caught.value) == (
        "A function given to .map drew random numbers while it computed examples 0, 1, 2, 3 … 4 (5 in all), from a "
        "process-wide random number generator, a generator that the function refers to, or a new generator without a "
        "seed, so its result depends on which examples were read before. Write .map(f, random=True) before .batch, "
        "with which all these generators are seeded for each example."
    )


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_over_several_examples_of_a_data_set(draw):
    """The data set itself may draw; what comes after .batch may not."""
    with pytest.raises(ExactError, match="drew random numbers while it computed examples"):
        list(indexed(TEN).batch(5).map(draw))
    assert len(list(indexed(TEN).map(draw, random=True).batch(5).map(lambda x: x + 1))) == 2


def late(x):
    """Torch, for the first time in this process; writes to what it gets."""
    sys.modules["torch"] = torch
    x += 1
    return x + torch.rand(1).item()


@pytest.mark.parametrize("base", [lambda: arrays(np.zeros((4, 1))), lambda: stream([np.zeros(1) for _ in range(4)])])
def test_torch_is_seeded_if_a_function_imports_it(base, monkeypatch):
    expected = flat(base().map(late, random=True).batch(4))
    monkeypatch.delitem(sys.modules, "torch")
    assert flat(base().map(late, random=True).batch(4)) == expected
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ExactError, match="drew random numbers while it computed example"):
        list(base().map(late).batch(4))


def test_stages_above_a_cache_have_seeds_of_their_own():
    twice = (
        arrays(np.zeros(10)).map(DRAWS["random"], random=True).cache().map(lambda x: (x, random.random()), random=True)
    )
    below, above = next(iter(twice.batch(10)))
    assert not set(below) & set(above)


class Several:
    """A data set that reads several at once, and draws."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        self.asked.append(indices)
        return [(index, random.random()) for index in indices]


def test_a_data_set_with_getitems():
    dataset = Several()
    first = list(indexed(dataset).batch(5))
    assert dataset.asked == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert flat(first) == flat(indexed(dataset).batch(5))
    dataset.asked.clear()
    one, other = (np.concatenate([batch[1] for batch in indexed(dataset).cache().batch(n)]) for n in (5, 2))
    assert dataset.asked[:3] == [[0], [1], [2]]  # a cached example must not feel its neighbours
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "pipeline",
    [
        lambda workers: arrays(TEN).map(refuses_seven, workers=workers).batch(4),
        lambda workers: indexed(WithoutSeven(), workers=workers).batch(4),
        lambda workers: stream(range(10)).map(refuses_seven, workers=workers).batch(4),
    ],
    ids=["map", "data set", "stream"],
)
def test_an_example_that_fails(pipeline, workers):
    read = iter(pipeline(workers))
    next(read)
    with pytest.raises(ExampleError) as caught:
        next(read)
    assert str(caught.value) == (
        "The data set or a function given to .map failed on example 7: KeyError: 'no such thing'. Fix the "
        "code, or leave such examples out."
    )
    assert type(caught.value.__cause__) is KeyError
    if workers:
        assert "The traceback in worker reader 0:" in caught.value.__notes__[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_several_examples_that_fail_at_once(workers):
    def explode(x):
        raise OSError("disk")

    with pytest.raises(ExampleError, match=r"failed on examples 0, 1, 2, 3 … 5 \(6 in all\): OSError: disk\."):
        list(arrays(TEN).batch(6).map(explode, workers=workers))


def test_examples_of_different_sizes():
    with pytest.raises(BatchError, match=r"cannot be stacked: ndarray\(1,\) and ndarray\(2,\)"):
        list(arrays(TEN).map(lambda x: np.zeros(x + 1)).batch(2))


def test_a_tuple_is_passed_as_several_arguments():
    assert list(arrays({"x": TEN}).map(lambda example: example["x"] + 1).take(1)) == [1]
    assert list(indexed([(1, "a")]).map(lambda number, name: f"{name}{number}")) == ["a1"]
    assert flat(arrays(IMAGES, LABELS).map(augmented, random=True).batch(5)) == flat(
        indexed(list(zip(IMAGES, LABELS, strict=True))).map(augmented, random=True).batch(5)
    )


def test_torch_computes_on_one_thread_as_in_a_reader():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = list(arrays(TEN).map(lambda x: torch.get_num_threads()).take(1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found == [1]
