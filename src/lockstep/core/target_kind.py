"""Distinguishes labels, probabilities and binary targets by the shapes of outputs and targets.

Labels have the shape of the outputs without the axis of the classes. Probabilities have the shape of the outputs, with
one number for every class. Binary targets have one value for every output, as in binary or multi-label classification.
"""

from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import BatchError, ModelError

Shape = tuple[int, ...]


class Labels(NamedTuple):
    """The valid labels of a loss: 0 to `num_classes - 1`, and the label `ignored` if there is one."""

    num_classes: int
    ignored: int | None = None  # targets with this label do not count in the loss


class TargetKind(Enum):
    """The kind of the targets: labels, probabilities or binary targets.

    The predicted class is that of the largest output; for `BINARY`, each output is compared with a threshold instead.
    """

    LABELS = "labels"
    PROBABILITIES = "probabilities"
    BINARY = "binary"


@lru_cache
def find_target_kind(
    metric: str, outputs: Shape, targets: Shape, *, axis: int = -1, binary: bool = False
) -> TargetKind:
    """Returns the kind of the targets; raises ModelError if the shapes fit no kind.

    `axis` is the axis of the classes in the outputs. `binary` says that the loss compares outputs and targets element
    by element.

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
    ways = [f"targets of shape {outputs}"] if outputs else []
    if len(outputs) > 1 and not binary:
        ways.append(f"labels of shape {outputs[:classes] + outputs[classes + 1 :]} (axis {classes} is the classes)")
    raise ModelError(
        f"{metric} cannot compare outputs of shape {outputs} with targets of shape {targets}. "
        f"Give {', or '.join([*ways, 'your own metric, a function of (outputs, targets)'])}."
    )


def check_labels(labels: NDArray[Any], num_classes: int, ignored: int | None, weights: Any = None) -> None:
    """Raises BatchError if a label is not the number of a class, unless the label is `ignored` or has weight 0.

    >>> check_labels(np.array([0, 2, -100]), 3, ignored=-100)
    >>> check_labels(np.array([0, 3]), 3, ignored=None, weights=np.array([1.0, 0.0]))
    """
    outside = ~((labels >= 0) & (labels < num_classes))  # written so that NaN is outside, too
    if not outside.any():
        return
    if ignored is not None:
        outside &= labels != ignored
    if weights is not None and np.size(weights) == len(labels):
        counted = np.reshape(weights, -1) != 0
        outside &= counted.reshape(-1, *[1] * (labels.ndim - 1))
    if outside.any():
        raise BatchError(
            f"Labels must be from 0 to {num_classes - 1}. Got {labels[outside][0]}. Fix the labels, or give the "
            "model's last layer more outputs."
        )
