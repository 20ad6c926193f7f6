"""The numbers of a run."""

import numpy as np
import pytest

from lockstep.core.loss_reduction import Reduction
from lockstep.core.run_state import Run, saved_reduction
from lockstep.errors import CheckpointError, PlanError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shards": 0}, "shards must be an integer, 1 or more. Got shards=0. Leave shards out to use the default."),
        ({"shards": 2.0}, "shards must be an integer, 1 or more. Got shards=2.0. Leave shards out to use the default."),
        (
            {"threads": -1},
            "threads must be an integer, 1 or more. Got threads=-1. Leave threads out to use the default.",
        ),
        (
            {"shards": True},
            "shards must be an integer, 1 or more. Got shards=True. Leave shards out to use the default.",
        ),
        (
            {"shards": 10**7},
            "shards=10000000 is more than the limit of 4,096. Use the largest number of devices that this run will "
            "ever have, e.g. shards=8.",
        ),
        ({"seed": True}, "seed must be an integer. Got seed=True. Use seed=0."),
        ({"seed": "a"}, "seed must be an integer. Got seed='a'. Use seed=0."),
        ({"seed": None}, "seed must be an integer. Got seed=None. Use seed=0."),
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
        "The checkpoint or backup cannot be read, because it is damaged or was not written by Lockstep: it has "
        f"reduction={value!r}. Use another checkpoint or backup."
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
        ({"shards": 5_000_000}, "shards=5000000 is more than the limit"),
        ({"step": -1}, "it has step=-1 and epoch=0. Use another checkpoint"),
        ({"epoch": 1.5}, "it has step=3 and epoch=1.5"),
    ],
)
def test_saved_numbers_that_mean_nothing(forged, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        Run.from_saved({**Run(step=3).state(), **forged})
    assert str(caught.value).startswith(
        "The checkpoint or backup cannot be read, because it is damaged or was not written by Lockstep: "
    )


def test_saved_numbers_that_are_missing():
    with pytest.raises(CheckpointError, match=r"it has no .seed.\. Use another checkpoint or backup\."):
        Run.from_saved({"step": 3, "epoch": 0, "shards": None, "threads": None})
