"""What the targets of a batch are: labels, probabilities or binary targets, as the shapes of outputs and targets say.

Labels lack the axis of the classes; probabilities have a number for every class; binary
targets are yes or no for every element, as in a loss of two classes or of many labels.
"""

from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import BatchError, ModelError

Shape = tuple[int, ...]


class Labels(NamedTuple):
    """What labels of classes may be."""

    num_classes: int
    ignored: int | None = None  # a label that the loss leaves out


class TargetKind(Enum):
    """What targets are: outputs for `BINARY` are compared with a threshold, all others by their largest element."""

    LABELS = "labels"
    PROBABILITIES = "probabilities"
    BINARY = "binary"


def find_target_kind(
    metric: str, outputs: Shape, targets: Shape, *, axis: int = -1, binary: bool = False
) -> TargetKind:
    """What the targets are; `binary` says that the loss takes them element by element.

    >>> find_target_kind("accuracy", (8, 3), (8,)), find_target_kind("accuracy", (8, 3), (8, 3))
    (<TargetKind.LABELS: 'labels'>, <TargetKind.PROBABILITIES: 'probabilities'>)
    >>> find_target_kind("accuracy", (8, 1), (8,))
    <TargetKind.BINARY: 'binary'>
    """
    outputs, targets = tuple(outputs), tuple(targets)
    classes = axis % len(outputs) if -len(outputs) <= axis < len(outputs) else 0
    column = outputs[-1:] == (1,)
    if outputs == targets and outputs:
        return TargetKind.BINARY if binary or column or len(outputs) == 1 else TargetKind.PROBABILITIES
    if column and outputs[:-1] == targets:
        return TargetKind.BINARY
    if len(outputs) > 1 and outputs[:classes] + outputs[classes + 1 :] == targets and not binary:
        return TargetKind.LABELS
    raise ModelError(
        f"{metric} compares outputs with a label for each row of classes (on axis {classes}), or with targets of the "
        f"same shape. Got outputs of shape {outputs} and targets of {targets}. Reshape one of them, or give a metric "
        "of your own: a function of (outputs, targets)."
    )


def check_labels(labels: NDArray[Any], num_classes: int, ignored: int | None, weights: Any = None) -> None:
    """Raise if labels are none of the classes; those that are ignored, or weigh nothing, may be anything.

    >>> check_labels(np.array([0, 2, -100]), 3, ignored=-100)
    >>> check_labels(np.array([0, 3]), 3, ignored=None, weights=np.array([1.0, 0.0]))
    """
    outside = ~((labels >= 0) & (labels < num_classes))  # NaN is neither
    if not outside.any():
        return
    if ignored is not None:
        outside &= labels != ignored
    if weights is not None and np.size(weights) == len(labels):
        counted = np.reshape(weights, -1) != 0
        outside &= counted.reshape(-1, *[1] * (labels.ndim - 1))
    if outside.any():
        raise BatchError(
            f"Labels run from 0 to {num_classes - 1}. Got {labels[outside][0]}. "
            "Fix the labels, or give the model's last layer more outputs."
        )
