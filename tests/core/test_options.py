"""Options check themselves."""

import pytest

from lockstep.core.options import Options
from lockstep.errors import PlanError


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 3])
def test_good_values(precision, clip_norm):
    assert Options(precision, clip_norm).exact


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "fp8"}, "precision is None, 'bf16' or 'fp16'. Got 'fp8'. Use one of these."),
        ({"clip_norm": 0}, "clip_norm is a number above 0. Got 0. Leave it out to clip nothing."),
        ({"clip_norm": float("nan")}, "clip_norm is a number above 0. Got nan. Leave it out to clip nothing."),
    ],
)
def test_errors(values, message):
    with pytest.raises(PlanError) as caught:
        Options(**values)
    assert str(caught.value) == message
