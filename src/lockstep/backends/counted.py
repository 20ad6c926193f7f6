"""Counted: by what a Keras loss's own mean has divided.

Keras's losses go with Keras models whatever these run on, and with functions of plain
TensorFlow. Nothing is imported here.
"""

from typing import Any, NamedTuple


class Counted(NamedTuple):
    """By what a loss's own mean has divided.

    Weights of both signs may cancel in a shard that has a gradient all the same. Keras then takes the mean for 0, so
    `total` is the sum that it would have divided.
    """

    weight: Any
    there: Any  # whether anything counts
    total: Any  # None where a mean of 0 is right
