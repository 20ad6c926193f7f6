"""The order of an epoch under shuffle, take and repeat."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.permutation import order
from lockstep.data.order import Order, Repeat, Shuffle, Take

ONE, TWO = (order(7, epoch, 5).between(0, 5).tolist() for epoch in (0, 1))


@pytest.mark.parametrize(
    ("moves", "epoch", "num", "indices"),
    [
        ([], 0, 5, [0, 1, 2, 3, 4]),
        ([], 3, 5, [0, 1, 2, 3, 4]),
        ([Shuffle(7)], 0, 5, ONE),
        ([Shuffle(7)], 1, 5, TWO),
        ([Shuffle(7), Take(2)], 0, 2, ONE[:2]),
        ([Take(9)], 0, 5, [0, 1, 2, 3, 4]),  # more than there are
        ([Take(3), Take(2)], 0, 2, [0, 1]),
        ([Shuffle(7), Repeat(), Take(10)], 0, 10, ONE + TWO),
        ([Shuffle(7), Repeat(), Take(5)], 1, 5, TWO),  # an epoch goes on with the next round
        ([Take(2), Repeat(), Take(5)], 0, 5, [0, 1, 0, 1, 0]),
    ],
)
def test_moves(moves, epoch, num, indices):
    found = Order(5, moves)
    assert found.num == num
    assert found.locate(epoch, 0, num)[1].tolist() == indices


def test_infinite_repeats():
    endless = Order(5, [Shuffle(7), Repeat()])
    assert endless.num is None
    epochs, indices = endless.locate(0, 3, 8)
    assert epochs.tolist() == [0, 0, 1, 1, 1]
    assert indices.tolist() == ONE[3:] + TWO[:3]
    far, _ = endless.locate(0, 5 * 10**9, 5 * 10**9 + 1)
    assert far.tolist() == [10**9]


@given(st.integers(1, 30), st.lists(st.sampled_from([Shuffle(1), Shuffle(2), Take(7), Take(20)]), max_size=4))
def test_ranges_are_parts_of_the_whole_order(num, moves):
    found = Order(num, moves)
    whole = found.locate(2, 0, found.num)[1]
    assert len(np.unique(whole)) == found.num
    parts = [found.locate(2, place, place + 1)[1][0] for place in range(found.num)]
    assert whole.tolist() == parts
