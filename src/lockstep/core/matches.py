"""Matches: what outputs are compared with, as the shapes of both tell it.

Labels lack the axis of the classes; odds have a number for every class; flags are
yes or no for every element, as in a loss of two classes or of many labels.
"""

from enum import Enum

from lockstep.errors import ModelError

Shape = tuple[int, ...]


class Match(Enum):
    """What targets are: the outputs of `FLAGS` are compared with a threshold, all others by their largest."""

    LABELS = "labels"
    ODDS = "odds"
    FLAGS = "flags"


def match(metric: str, outputs: Shape, targets: Shape, *, axis: int = -1, flags: bool = False) -> Match:
    """What the targets are; `flags` says that the loss takes them element by element.

    >>> match("accuracy", (8, 3), (8,)), match("accuracy", (8, 1), (8,)), match("accuracy", (8, 3), (8, 3))
    (<Match.LABELS: 'labels'>, <Match.FLAGS: 'flags'>, <Match.ODDS: 'odds'>)
    """
    outputs, targets = tuple(outputs), tuple(targets)
    classes = axis % len(outputs) if -len(outputs) <= axis < len(outputs) else 0
    column = outputs[-1:] == (1,)
    if outputs == targets and outputs:
        return Match.FLAGS if flags or column or len(outputs) == 1 else Match.ODDS
    if column and outputs[:-1] == targets:
        return Match.FLAGS
    if len(outputs) > 1 and outputs[:classes] + outputs[classes + 1 :] == targets and not flags:
        return Match.LABELS
    raise ModelError(
        f"{metric} compares outputs with a label for each row of classes (on axis {classes}), or with targets of the "
        f"same shape. Got outputs of shape {outputs} and targets of {targets}. Reshape one of them, or give a metric "
        "of your own: a function of (outputs, targets)."
    )
