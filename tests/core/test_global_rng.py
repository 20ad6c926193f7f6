"""The process's generators, seeded for a while and put back."""

import random

import numpy as np
import pytest
import torch

from lockstep.core import global_rng

DRAWS = {
    "random": random.random,
    "numpy": np.random.rand,
    "normal": np.random.randn,  # keeps one number back
    "torch": lambda: torch.rand(1).item(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_seeded_and_put_back(draw):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    draw()
    with global_rng.kept():
        global_rng.seed(2**62)
        first = draw()
        global_rng.seed(2**62)
        assert draw() == first
    following = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    draw()
    assert draw() == following


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_noticed(draw):
    with global_rng.kept() as before:
        assert not global_rng.moved(before)
        draw()
        assert global_rng.moved(before)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_generators_of_ones_own_go_on_where_they_stopped(draw):
    found = []
    for interrupted in (False, True):
        apart = global_rng.Apart(5)
        for _ in range(2):
            with apart:
                found.append(draw())
            if interrupted:
                draw()
    assert found[:2] == found[2:]
    assert found[0] != found[1]
