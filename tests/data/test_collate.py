"""Stacking examples to a batch."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from lockstep.data.collate import concatenate, select_example, stack
from lockstep.errors import BatchError


class Pair(NamedTuple):
    left: object
    right: object


CASES = [
    ([1, 2], np.array([1, 2])),
    ([1.5, 2.5], np.array([1.5, 2.5])),
    ([True, False], np.array([True, False])),
    ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
    ([np.zeros((2, 3)), np.ones((2, 3))], np.stack([np.zeros((2, 3)), np.ones((2, 3))])),
    ([torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)], np.array([[0, 0], [1, 1]], np.int32)),
    ([torch.tensor(3), torch.tensor(4)], np.array([3, 4])),
    (["a", "b"], ["a", "b"]),
    ([(np.zeros(1), 1), (np.ones(1), 2)], (np.array([[0.0], [1.0]]), np.array([1, 2]))),
    ([[np.zeros(1), 1], [np.ones(1), 2]], (np.array([[0.0], [1.0]]), np.array([1, 2]))),  # as loaders make it
    ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),  # token ids
    ([{"x": 1, "s": "a"}, {"x": 2, "s": "b"}], {"x": np.array([1, 2]), "s": ["a", "b"]}),
    ([((1, {"y": 2}), 3)], ((np.array([1]), {"y": np.array([2])}), np.array([3]))),
]


@pytest.mark.parametrize(("examples", "batch"), CASES, ids=str)
def test_examples_are_stacked_and_selected_again(examples, batch):
    found = stack(examples)
    np.testing.assert_equal(found, batch)
    again = stack([select_example(found, index) for index in range(len(examples))])
    np.testing.assert_equal(again, batch)
    np.testing.assert_equal(concatenate([stack([each]) for each in examples]), batch)


def test_named_tuples():
    found = stack([Pair(1, 2), Pair(3, 4)])
    assert found.left.tolist() == [1, 3]
    assert select_example(found, 1) == Pair(3, 4)


def test_stacking_keeps_types():
    assert stack([np.zeros(2, np.uint8)]).dtype == np.uint8
    assert stack([1]).dtype == np.int64
    assert stack([torch.zeros(1, requires_grad=True)]).dtype == np.float32


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (
            [np.zeros((2, 3)), np.zeros((2, 4))],
            "Examples of different structure or shape cannot be stacked: ndarray(2, 3) and ndarray(2, 4). "
            "Make the examples equal with .map(...), for example by cutting or padding arrays to one size.",
        ),
        (
            [(1, 2), (1, 2, 3)],
            "Examples of different structure or shape cannot be stacked: (int, int) and (int, int, int).",
        ),
        (
            [{"x": 1}, {"y": 1}],
            "Examples of different structure or shape cannot be stacked: {'x': int} and {'y': int}.",
        ),
        ([(1, 2), 3], "Examples of different structure or shape cannot be stacked: (int, int) and int."),
        (
            [None, None],
            "An example contains NoneType, which cannot be stacked. Convert the value with .map(...) to "
            "arrays, numbers, strings, or tuples and dicts of these.",
        ),
        ([np.array([None])], "An example contains ndarray(1,) whose elements are Python objects, which cannot be"),
        ([torch.zeros(1, dtype=torch.bfloat16)], "Tensor(1,) cannot be converted to numpy, which stacks the examples:"),
    ],
)
def test_examples_that_cannot_be_stacked_are_refused(examples, message):
    with pytest.raises(BatchError) as caught:
        stack(examples)
    assert str(caught.value).startswith(message)
