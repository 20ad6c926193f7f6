"""The numbers of a run, and the line that says them."""

import pytest

from lockstep.errors import PlanError
from lockstep.run import Run

CPUS = [f"cpu:{index}" for index in range(8)]


@pytest.mark.parametrize(
    ("run", "batch_size", "devices", "raised", "line"),
    [
        (
            Run(0, 8, 1),
            256,
            CPUS[:2],
            False,
            "2 devices (cpu:0, cpu:1), 8 shards of 32, batch 256, 1 thread per shard, seed 0",
        ),
        (Run(7, 1, 4), 32, CPUS[:1], False, "1 device (cpu:0), 1 shard of 32, batch 32, 4 threads per shard, seed 7"),
        (
            Run(0, 8, 1),
            61,
            CPUS[:5],  # too many to name
            False,
            "5 devices (cpu:0 … cpu:4), 8 shards of 7 or 8, batch 61, 1 thread per shard, seed 0",
        ),
        (
            Run(0, 4, 1),
            64,
            CPUS[:3],
            True,
            "3 devices (cpu:0, cpu:1, cpu:2), 4 shards of 16 (more than the batch alone would have, so that every "
            "device has one), batch 64, 1 thread per shard, seed 0",
        ),
        (Run(0, 8, 1), 256, ["cuda:0"], False, "1 device (cuda:0), 8 shards of 32, batch 256, seed 0"),
    ],
)
def test_opening(run, batch_size, devices, raised, line):
    assert run.opening(batch_size, devices, raised) == line


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shards": 0}, "shards is a whole number from 1 on. Got shards=0. Leave it out to choose."),
        ({"shards": 2.0}, "shards is a whole number from 1 on. Got shards=2.0. Leave it out to choose."),
        ({"threads": -1}, "threads is a whole number from 1 on. Got threads=-1. Leave it out to choose."),
        ({"seed": "a"}, "seed is a whole number. Got seed='a'. Use seed=0."),
        ({"seed": None}, "seed is a whole number. Got seed=None. Use seed=0."),
    ],
)
def test_errors(values, message):
    with pytest.raises(PlanError) as caught:
        Run(**values)
    assert str(caught.value) == message
