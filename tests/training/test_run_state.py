"""The numbers of a run, and the line that says them."""

import numpy as np
import pytest

from lockstep.core.reduction import Reduction
from lockstep.errors import CheckpointError, PlanError
from lockstep.training.run_state import Run, saved_reduction

CPUS = [f"cpu:{index}" for index in range(8)]


@pytest.mark.parametrize(
    ("run", "batch_size", "devices", "note", "line"),
    [
        (
            Run(0, 8, 1),
            256,
            CPUS[:2],
            "",
            "2 devices (cpu:0, cpu:1), 8 shards of 32, batch 256, 1 thread per shard, seed 0",
        ),
        (Run(7, 1, 4), 32, CPUS[:1], "", "1 device (cpu:0), 1 shard of 32, batch 32, 4 threads per shard, seed 7"),
        (
            Run(0, 8, 1),
            61,
            CPUS[:5],  # too many to name
            "",
            "5 devices (cpu:0 … cpu:4), 8 shards of 7 or 8, batch 61, 1 thread per shard, seed 0",
        ),
        (
            Run(0, 4, 1),
            64,
            CPUS[:3],
            "raised",
            "3 devices (cpu:0, cpu:1, cpu:2), 4 shards of 16 (raised), batch 64, 1 thread per shard, seed 0",
        ),
        (Run(0, 8, 1), 256, ["cuda:0"], "", "1 device (cuda:0), 8 shards of 32, batch 256, seed 0"),
        (
            Run(0, 8, 1, reduction=Reduction.ASSUMED),
            256,
            ["cuda:0"],
            "",
            "1 device (cuda:0), 8 shards of 32, batch 256, seed 0, loss: taken as the mean over examples",
        ),
        (
            Run(0, 8, 1, reduction=Reduction.SUM),
            256,
            ["cuda:0"],
            "",
            "1 device (cuda:0), 8 shards of 32, batch 256, seed 0",
        ),
    ],
)
def test_opening(run, batch_size, devices, note, line):
    assert run.opening(batch_size, devices, note) == line


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shards": 0}, "shards is a whole number from 1 on. Got shards=0. Leave it out to choose."),
        ({"shards": 2.0}, "shards is a whole number from 1 on. Got shards=2.0. Leave it out to choose."),
        ({"threads": -1}, "threads is a whole number from 1 on. Got threads=-1. Leave it out to choose."),
        ({"shards": True}, "shards is a whole number from 1 on. Got shards=True. Leave it out to choose."),
        (
            {"shards": 10**7},
            "shards is the number of parts of a batch, at most 4,096. Got shards=10000000. "
            "Use as many as the most devices that this run will ever have, e.g. shards=8.",
        ),
        ({"seed": True}, "seed is a whole number. Got seed=True. Use seed=0."),
        ({"seed": "a"}, "seed is a whole number. Got seed='a'. Use seed=0."),
        ({"seed": None}, "seed is a whole number. Got seed=None. Use seed=0."),
    ],
)
def test_errors(values, message):
    with pytest.raises(PlanError) as caught:
        Run(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("reduction", [None, *Reduction])
def test_how_the_loss_is_taken_is_saved(reduction):
    saved = Run(step=3, reduction=reduction).state()
    run = Run()
    run.take_over(Run.from_saved(saved))
    assert run.reduction is reduction


def test_a_run_that_was_saved_without_goes_on_with_the_mean():
    state = Run(step=3).state()
    del state["reduction"]
    assert saved_reduction(state) is Reduction.ASSUMED
    assert saved_reduction({**state, "step": 0}) is None  # nothing was taken for anything yet


@pytest.mark.parametrize("value", ["median", 3, ["sum"]])
def test_a_manifest_that_says_something_else(value):
    with pytest.raises(CheckpointError) as caught:
        saved_reduction({"step": 1, "reduction": value})
    assert str(caught.value) == (
        f"A manifest holds 'reduction' as Lockstep writes it. Got {value!r}. Use another checkpoint."
    )


def test_numpys_integers_become_pythons():
    """A checkpoint's JSON takes no others."""
    run = Run(np.int64(3), np.int32(4), np.uint8(2))
    assert {type(value) for value in (run.seed, run.shards, run.threads)} == {int}


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ({"threads": -3}, "Got threads=-3"),
        ({"threads": "x"}, "Got threads='x'"),
        ({"shards": True}, "Got shards=True"),
        ({"shards": 5_000_000}, "Got shards=5000000"),
        ({"step": -1}, "Got step=-1, epoch=0. Use another checkpoint."),
        ({"epoch": 1.5}, "Got step=3, epoch=1.5"),
    ],
)
def test_saved_numbers_that_mean_nothing(forged, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        Run.from_saved({**Run(step=3).state(), **forged})
    assert str(caught.value).startswith("A manifest holds a run as Lockstep writes it. ")


def test_saved_numbers_that_are_missing():
    with pytest.raises(CheckpointError, match=r"It lacks .seed.\. Use another checkpoint\."):
        Run.from_saved({"step": 3, "epoch": 0, "shards": None, "threads": None})
