"""The trace of a run: valid JSON at any time, with the shards in the lanes of their devices."""

import json

import pytest

from lockstep.core.attempt import Attempt, Timing
from lockstep.core.plan import Plan
from lockstep.display.trace_file import TraceFile

DEVICES = ("cpu:0", "cpu:1")
PLAN = Plan.even(4, range(2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "run.json"


@pytest.fixture
def trace(path):
    file = TraceFile(path, start=100.0)
    yield file
    file.close(None, "finished")


def read(path, kind="X"):
    return [event for event in json.loads(path.read_bytes()) if event["ph"] == kind]


def measure(start, shards, apart=True):
    """What a process measures that computes each shard in a second, apart or all in one program."""
    end = start + len(shards)
    timings = [Timing(shard, start + index, start + index + 1) for index, shard in enumerate(shards) if apart]
    return [
        *timings,
        Timing("compute", start, end),
        Timing("exchange", end, end + 1),
        Timing("update", end + 1, end + 1),
    ]


def attempt(step, start, **options):
    timings = {0: measure(start, [0, 1]), 1: measure(start, [2, 3])}
    return Attempt(step, PLAN, **{"timings": timings, **options})


def test_each_shard_is_a_slice_in_the_lane_of_its_device(trace, path):
    trace.add_attempt(attempt(7, 100.0), DEVICES, 104.0)
    trace.close(None, "finished")
    lanes = {event["tid"]: event["args"]["name"] for event in read(path, "M") if event["name"] == "thread_name"}
    found = [(lanes[event["tid"]], event["name"], event["ts"], event["dur"]) for event in read(path)]
    assert found == [
        ("cpu:0", "shard 0", 0.0, 1e6),
        ("cpu:0", "shard 1", 1e6, 1e6),
        ("cpu:0", "exchange", 2e6, 1e6),
        ("cpu:1", "shard 2", 0.0, 1e6),
        ("cpu:1", "shard 3", 1e6, 1e6),
        ("cpu:1", "exchange", 2e6, 1e6),
    ]


def test_shards_of_one_program_are_one_slice(trace, path):
    trace.add_attempt(attempt(0, 100.0, timings={0: measure(100.0, [0, 1], apart=False)}), DEVICES, 103.0)
    trace.close(None, "finished")
    assert [event["name"] for event in read(path)] == ["shards 0 to 1", "exchange"]


def test_a_lost_device_has_a_slice_and_the_repeated_step_another_attempt(trace, path):
    trace.add_attempt(
        attempt(3, 100.0, timings={0: measure(100.0, [0])}, is_committed=False, lost={1: 2}), DEVICES, 105.0
    )
    trace.add_attempt(Attempt(3, Plan((0,) * 4, (0,)), {0: measure(105.0, [0, 1, 2, 3])}), DEVICES[:1], 110.0)
    trace.close(None, "finished")
    found = [(event["tid"], event["name"], event["args"]["attempt"]) for event in read(path)]
    assert (0, "shard 0 (to be made again)", 1) in found
    assert (1, "lost in shard 2", 1) in found
    assert (0, "shard 2", 2) in found
    assert [event["name"] for event in read(path, "i")] == ["cpu:1 was lost"]


def test_the_file_is_valid_at_any_time_and_the_memory_is_bounded(trace, path):
    before = 0
    for step in range(300):
        trace.add_attempt(attempt(step, 100.0 + step), DEVICES, 101.0 + step)
        found = len(read(path))
        assert before <= found <= 6 * (step + 1)
        assert 6 * (step + 1) - found < 256
        before = found
    trace.end_epoch(None, "")
    assert len(read(path)) == 1800
    trace.add_pause("checkpoint", 500.0, 500.5, 300)
    trace.close(None, "finished")
    trace.close(None, "finished")
    assert [(event["name"], event["dur"]) for event in read(path)][-1] == ("checkpoint", 500_000.0)
