"""The global random number generators, seeded for a while and restored."""

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
def test_global_generators_are_seeded_and_restored(draw):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    draw()
    with global_rng.restore_afterwards():
        global_rng.seed_all(2**62)
        first = draw()
        global_rng.seed_all(2**62)
        assert draw() == first
    following = draw()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    draw()
    assert draw() == following


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_changes_the_states(draw):
    with global_rng.restore_afterwards() as before:
        assert not global_rng.has_changed(before)
        draw()
        assert global_rng.has_changed(before)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_separate_generators_continue_where_they_stopped(draw):
    found = []
    for interrupted in (False, True):
        apart = global_rng.SeparateGenerators(5)
        for _ in range(2):
            with apart:
                found.append(draw())
            if interrupted:
                draw()
    assert found[:2] == found[2:]
    assert found[0] != found[1]
