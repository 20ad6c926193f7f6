"""The line that training opens with."""

import pytest

from lockstep.core.loss_reduction import Reduction
from lockstep.core.run_state import Run
from lockstep.display.opening_line import format_opening

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
    assert format_opening(run, batch_size, devices, note) == line
