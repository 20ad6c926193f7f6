"""The time breakdown of a step, and the sentence about its largest limit."""

import pytest

from lockstep.core.time_breakdown import Breakdown, Stopwatch


def broken_down(*replicas, has_callbacks=False):
    parts = [dict(zip(("input", "compute", "exchange", "update"), each, strict=True)) for each in replicas]
    return Breakdown([f"cpu:{index}" for index in range(len(parts))], parts, 100.0, 10, 2560, has_callbacks)


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        ([(62, 30, 4, 4)], "62 % of the step waits for input: add .prefetch(2), or workers=2"),
        ([(1, 90, 4, 4)], "90 % of the step computes: the devices are busy"),
        (  # what is larger is named before it
            [(1, 60, 34, 4), (1, 90, 4, 4)],
            "90 % of the step computes; 30 % of the step is spent waiting for cpu:1, the slowest",
        ),
        ([(1, 40, 44, 4), (1, 40, 44, 4)], "44 % of the step brings the gradients together"),
        ([(1, 30, 4, 64)], "64 % of the step is the optimizer's"),
        ([(1, 40, 4, 4)], "51 % of the step is the loop's own work between the steps: a larger batch"),
        ([(1, 44, 15, 16)], "44 % of the step computes; 24 % of the step is the loop's own work"),
        ([(1, 30, 4, 4), (62, 30, 4, 4)], "62 % of the step waits for input"),  # of the replica that waits most
    ],
)
def test_the_largest_limit_is_described(replicas, sentence):
    assert broken_down(*replicas).describe_limit().startswith(sentence)


def test_callbacks_are_mentioned_only_if_there_are_any():
    assert broken_down((1, 40, 4, 4), has_callbacks=True).describe_limit() == (
        "51 % of the step is neither input nor training: look at the callbacks"
    )
    assert "callbacks" not in broken_down((1, 40, 4, 4)).describe_limit()


def test_a_breakdown_without_steps():
    nothing = Breakdown(["cpu:0"], [Stopwatch(lambda: 0.0).take()], 0.0, 0, 0)
    assert nothing.samples_per_second == 0.0
    assert nothing.share(0, "rest") == 0.0
    assert nothing.describe_limit().startswith("0 % of the step computes")
