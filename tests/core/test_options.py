"""Validation of the options of a step."""

import pytest

from lockstep.core.options import Options
from lockstep.errors import PlanError


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 3])
def test_valid_options(precision, clip_norm):
    assert Options(precision, clip_norm).exact


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is not supported. Use None, 'bf16' or 'fp16'."),
        ({"clip_norm": 0}, "clip_norm=0 must be a number above 0. Leave clip_norm out to disable clipping."),
        (
            {"clip_norm": float("nan")},
            "clip_norm=nan must be a number above 0. Leave clip_norm out to disable clipping.",
        ),
    ],
)
def test_invalid_values_are_refused(values, message):
    with pytest.raises(PlanError) as caught:
        Options(**values)
    assert str(caught.value) == message
