"""The pictures of the documentation that are made from a real run."""

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.core.attempt import Attempt, Timing
from lockstep.core.plan import Plan
from lockstep.display.trace_file import TraceFile

ROOT = Path(__file__).parents[2]
DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def measure(plan, now):
    """The timings of each replica, which computes a shard in a second."""
    timings = {}
    for replica in plan.replicas:
        shards = plan.shards_of([replica])
        own = [Timing(shard, now + index, now + index + 1) for index, shard in enumerate(shards)]
        timings[replica] = [*own, Timing("exchange", now + len(shards), now + 4), Timing("update", now + 4, now + 4.5)]
    return timings


def test_the_picture_of_a_lost_worker_is_drawn_from_a_trace(tmp_path):
    spec = importlib.util.spec_from_file_location("recovery", ROOT / "benchmarks" / "recovery_picture.py")
    recovery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recovery)
    everyone, others = Plan.even(6, range(3)), Plan.even(6, [0, 2])
    trace = TraceFile(tmp_path / "run.json", 0.0)
    survivors = {replica: own[:2] for replica, own in measure(everyone, 5.0).items() if replica != 1}
    trace.add_attempt(Attempt(0, everyone, measure(everyone, 0.0)), DEVICES, 5.0)
    trace.add_attempt(Attempt(1, everyone, survivors, False, {1: 2}), DEVICES, 9.0)
    for step, plan in enumerate([others, others, others, everyone, everyone], start=1):
        trace.add_attempt(Attempt(step, plan, measure(plan, 5.0 + 5 * step)), DEVICES, 10.0 + 5 * step)
    trace.close(None, "finished")
    picture = ElementTree.fromstring(recovery.draw(json.loads((tmp_path / "run.json").read_text())))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert [text for text in texts if "step" in text] == [
        *("step 0", "step 1", "step 1 again", "step 2"),
        *("step 3", "step 4"),  # before and after another process has joined
    ]
    assert {"killed", "the others compute all shards", "another process joins", *DEVICES} <= set(texts)


@pytest.mark.parametrize(("name", "most"), [("recovery.svg", 60_000), ("report.png", 80_000)])
def test_pictures_are_small(name, most):
    assert 1000 < (ROOT / "docs" / name).stat().st_size <= most
