import pytest

from lockstep.core.target_kind import TargetKind, find_target_kind
from lockstep.errors import ModelError


@pytest.mark.parametrize(
    ("outputs", "targets", "options", "found"),
    [
        ((8, 3), (8,), {}, TargetKind.LABELS),
        ((8, 3), (8, 3), {}, TargetKind.PROBABILITIES),
        ((8, 3), (8, 3), {"binary": True}, TargetKind.BINARY),
        ((8,), (8,), {}, TargetKind.BINARY),
        ((8, 1), (8, 1), {}, TargetKind.BINARY),
        ((8, 1), (8,), {}, TargetKind.BINARY),  # not a label for the only class
        ((8, 3, 5), (8, 5), {"axis": 1}, TargetKind.LABELS),
        ((8, 5, 3), (8, 5), {}, TargetKind.LABELS),
        ((1, 3), (1,), {}, TargetKind.LABELS),
    ],
)
def test_what_targets_are(outputs, targets, options, found):
    assert find_target_kind("accuracy", outputs, targets, **options) is found


@pytest.mark.parametrize(
    ("outputs", "targets", "options"),
    [
        ((8, 3), (8, 1), {}),
        ((8,), (8, 1), {}),
        ((8, 5, 3), (8, 5), {"axis": 1}),
        ((8, 3), (8,), {"binary": True}),
        ((), (), {}),
        ((8, 3), (8, 4), {}),
    ],
)
def test_shapes_that_do_not_match(outputs, targets, options):
    with pytest.raises(ModelError) as caught:
        find_target_kind("top5", outputs, targets, **options)
    axis = options.get("axis", max(len(outputs) - 1, 0))
    assert str(caught.value) == (
        f"top5 compares outputs with a label for each row of classes (on axis {axis}), or with targets of the same "
        f"shape. Got outputs of shape {outputs} and targets of {targets}. Reshape one of them, or give a metric of "
        "your own: a function of (outputs, targets)."
    )
