"""Timings of shards: those of a framework that computes shard by shard, and none of one that computes all at once."""

import pytest

from lockstep.core.attempt import TimedFold, Timing
from lockstep.core.plan import Plan


@pytest.mark.parametrize(("before", "found"), [(1.0, [0, 1, "input"]), (9.0, ["input"])])
def test_shards_of_one_program_have_no_timings(before, found):
    """Each shard takes 2 seconds from its buffer to its leaf; `before` is how long the first buffer is waited for."""
    clock = iter([0.0, before, before + 2.0, before + 2.0, before + 4.0])
    timings = []
    fold = TimedFold(Plan.even(2, [0]), {0: {0: "a", 1: "b"}}, lambda *_: {}, lambda left, right, out: left)
    fold.set_clock(lambda: next(clock), timings)
    for shard in (0, 1):
        fold.get_buffer(shard)
        fold.push(shard, {})
    timings.append(Timing("input", 0.0, 0.0))
    fold.partial_sums()
    assert [timing.what for timing in timings] == found
