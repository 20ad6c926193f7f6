"""Sums of shards are added in the order of the tree."""

import numpy as np
import pytest

from lockstep.core import tree
from lockstep.core.shard_sums import add_rows


@pytest.mark.parametrize("filled", range(1, 18))
@pytest.mark.parametrize("empty", [0, 1, 5])
def test_rows_are_added_in_the_order_of_the_tree(filled, empty):
    generator = np.random.Generator(np.random.PCG64(filled))
    rows = generator.standard_normal((filled, 64)) * 10.0 ** generator.uniform(-9, 9, (filled, 64))
    expected = tree.fold([*rows, *[None] * empty], np.add)
    assert add_rows(rows).tobytes() == expected.tobytes()
