"""Counted: by what a Keras loss's own mean has divided, and which losses are Keras's.

Keras's losses go with Keras models whatever these run on, and with functions of plain
TensorFlow. Nothing is imported here.
"""

from typing import Any, NamedTuple


def is_of_keras(loss: Any) -> bool:
    """Whether a loss, or the function that it wraps, is one of Keras's, which give one value per example."""
    function = getattr(loss, "fn", loss)
    if hasattr(function, "call"):
        function = type(function).call
    return (getattr(function, "__module__", None) or "").startswith("keras.")


class Counted(NamedTuple):
    """By what a loss's own mean has divided.

    Weights of both signs may cancel in a shard that has a gradient all the same. Keras then takes the mean for 0, so
    `total` is the sum that it would have divided.
    """

    weight: Any
    there: Any  # whether anything counts
    total: Any  # None where a mean of 0 is right
