"""Which of two values of a metric is better, by name, by mode, and for NaN."""

import math

import pytest

from lockstep.core.monitor import Monitor
from lockstep.errors import ModelError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("mse", "min"),
        ("val_mae", "min"),
        ("perplexity", "min"),
        ("val_cross_entropy", "min"),
        ("mean_absolute_error", "min"),
        ("MeanSquaredError", "min"),
        ("word_error_rate", "min"),
        ("top1_error", "min"),  # the last word counts most
        ("val_dice_loss", "min"),
        ("acc", "max"),
        ("val_accuracy", "max"),
        ("sparse_top5_accuracy", "max"),
        ("top5", "max"),
        ("AUC", "max"),
        ("val_f1", "max"),
        ("f1_score", "max"),
        ("precision_at_10", "max"),
        ("BinaryIoU", "max"),
        ("r2", "max"),
    ],
)
def test_the_mode_follows_from_the_name(name, mode):
    assert Monitor(name).mode == mode


@pytest.mark.parametrize("name", ["speed", "learning_rate", "hits", "", "glossy", "error_top1", "entropy", "accurate"])
def test_an_ambiguous_name_needs_a_mode(name):
    with pytest.raises(ModelError) as caught:
        Monitor(name)
    assert str(caught.value) == (
        f"It is not known whether lower or higher values of {name!r} are better. Use mode='min' or mode='max'."
    )
    assert Monitor(name, mode="min").is_better(1.0, than=2.0)


@pytest.mark.parametrize(
    ("mode", "min_delta", "value", "than", "better"),
    [
        ("min", 0, 0.4, 0.5, True),
        ("min", 0, 0.5, 0.5, False),
        ("min", 0, 0.6, 0.5, False),
        ("max", 0, 0.6, 0.5, True),
        ("max", 0, 0.5, 0.5, False),
        ("max", 0, 0.4, 0.5, False),
        ("min", 0.25, 0.25, 0.5, False),  # exactly min_delta is not enough
        ("min", 0.25, 0.2, 0.5, True),
        ("max", 0.25, 0.75, 0.5, False),
        ("max", 0.25, 0.8, 0.5, True),
        ("min", 0, 5.0, None, True),
        ("max", 0.5, -5.0, None, True),
        ("min", 0, NAN, None, False),
        ("min", 0, NAN, 0.5, False),
        ("max", 0, NAN, NAN, False),
        ("max", 0, 0.5, NAN, True),
        ("min", 0, INF, None, False),  # as bad as it gets is no improvement on nothing
        ("max", 0, INF, 0.5, True),
        ("max", 0, -INF, None, False),
    ],
)
def test_is_better(mode, min_delta, value, than, better):
    assert Monitor("speed", mode, min_delta).is_better(value, than) == better


def test_value_is_a_plain_float():
    assert Monitor("val_loss").value({"loss": 1, "val_loss": 2}) == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Monitor("loss", "less"),
            "mode='less' is not supported. Use 'auto', 'min' or 'max'.",
        ),
        (
            lambda: Monitor("loss", min_delta=-1),
            (
                "min_delta=-1 must be a number, 0 or more: an improvement must be larger than min_delta. Use "
                "min_delta=0."
            ),
        ),
        (
            lambda: Monitor("loss", min_delta=NAN),
            (
                "min_delta=nan must be a number, 0 or more: an improvement must be larger than min_delta. Use "
                "min_delta=0."
            ),
        ),
        (
            lambda: Monitor("val_loss").value({"loss": 1.0, "accuracy": 0.5}),
            "The monitored metric 'val_loss' is not among the metrics of this run: 'loss', 'accuracy'. "
            "Call fit with validation_data=.",
        ),
        (
            lambda: Monitor("accuracy").value({"loss": 1.0}),
            "The monitored metric 'accuracy' is not among the metrics of this run: 'loss'. Use one of these.",
        ),
    ],
)
def test_invalid_values_are_refused(make, message):
    with pytest.raises(ModelError) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "logs", "hint"),
    [
        ("val_acc", ("loss", "accuracy", "val_loss", "val_accuracy"), "Use 'val_accuracy'."),
        ("val_los", ("loss", "val_loss"), "Use 'val_loss'."),
        ("acc", ("loss", "accuracy"), "Use one of these."),  # too far to be guessed
        ("val_auc", ("loss", "val_loss"), "Use one of these."),
        ("val_accuracy", ("loss", "accuracy"), "Call fit with validation_data=."),
    ],
)
def test_the_error_for_a_wrong_name_suggests_the_nearest(name, logs, hint):
    with pytest.raises(ModelError) as caught:
        Monitor(name, mode="max").value(dict.fromkeys(logs, 0.5))
    assert str(caught.value).endswith(hint)
