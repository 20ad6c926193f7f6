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
    ("outputs", "targets", "options", "ways"),
    [
        ((8, 3), (8, 1), {}, "targets of shape (8, 3), or labels of shape (8,) (axis 1 is the classes), or "),
        ((8,), (8, 1), {}, "targets of shape (8,), or "),
        (
            (8, 5, 3),
            (8, 5),
            {"axis": 1},
            "targets of shape (8, 5, 3), or labels of shape (8, 3) (axis 1 is the classes), or ",
        ),
        ((8, 3), (8,), {"binary": True}, "targets of shape (8, 3), or "),
        ((), (), {}, ""),
        ((8, 3), (8, 4), {}, "targets of shape (8, 3), or labels of shape (8,) (axis 1 is the classes), or "),
    ],
)
def test_shapes_that_do_not_match(outputs, targets, options, ways):
    with pytest.raises(ModelError) as caught:
        find_target_kind("top5", outputs, targets, **options)
    assert str(caught.value) == (
        f"top5 cannot compare outputs of shape {outputs} with targets of shape {targets}. Give {ways}your own metric, "
        "a function of (outputs, targets)."
    )
