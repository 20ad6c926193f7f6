"""What a person may ask for, and what is refused at once."""

from pathlib import Path

import pytest

from lockstep.checkpoint import Checkpoint
from lockstep.core.monitor import Monitor
from lockstep.errors import CheckpointError, ModelError


@pytest.mark.parametrize(
    "options",
    [{}, {"every": 1}, {"every": "epoch", "keep": None}, {"keep": 1}, {"best": "val_loss"}, {"best": Monitor("loss")}],
)
def test_valid_arguments(options):
    for path in ("ckpt/", Path("ckpt")):
        assert Checkpoint(path, **options).path == path


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        *(({"path": path}, "path must be a folder") for path in ("", None, 3)),
        *(({"every": every}, "every must be 'epoch' or a number") for every in (0, -1, "step", 1.5, True, None)),
        *(({"keep": keep}, "keep must be a number of checkpoints") for keep in (0, -1, "all", 2.0, True)),
        *(({"best": best}, "best must be the name of a metric") for best in (1, ["loss"], True)),
    ],
)
def test_invalid_arguments_raise(options, rule):
    with pytest.raises(CheckpointError, match=rule):
        Checkpoint(**{"path": "ckpt", **options})


@pytest.mark.parametrize("best", ["", "speed"])
def test_a_metric_without_a_known_direction_needs_a_mode(best):
    with pytest.raises(ModelError, match="mode='min' or mode='max'"):
        Checkpoint("ckpt", best=best)
