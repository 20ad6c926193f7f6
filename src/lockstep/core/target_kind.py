"""Matches: what outputs are compared with, as the shapes of both tell it.

Labels lack the axis of the classes; odds have a number for every class; flags are
yes or no for every element, as in a loss of two classes or of many labels.
"""

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import BatchError, ModelError

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


def check_labels(labels: NDArray[Any], num_classes: int, ignored: int | None, weights: Any = None) -> None:
    """Refuses labels that are none of the classes; those that are ignored, or weigh nothing, may be anything.

    >>> check_labels(np.array([0, 2, -100]), 3, ignored=-100)
    >>> check_labels(np.array([0, 3]), 3, ignored=None, weights=np.array([1.0, 0.0]))
    """
    outside = (labels < 0) | (labels >= num_classes)
    if not outside.any():
        return
    if ignored is not None:
        outside &= labels != ignored
    if weights is not None and np.size(weights) == len(labels):
        counted = np.reshape(weights, -1) != 0
        outside &= counted.reshape(-1, *[1] * (labels.ndim - 1))
    if outside.any():
        raise BatchError(f"Labels run from 0 to {num_classes - 1}. Got {labels[outside][0]}. Mend the labels.")
