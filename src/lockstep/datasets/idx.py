"""The idx format of the MNIST family: a magic number, the lengths of the axes, then the bytes.

The header says exactly how many bytes must follow; one too few or too many is an error, never a shorter array.
"""

import math
import struct

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DatasetError

UINT8 = 0x08  # the one element type this family uses


def parse(content: bytes, *, num_axes: int) -> NDArray[np.uint8]:
    """Gives the array that `content` holds.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), num_axes=1)
    array([7, 8, 9], dtype=uint8)
    """
    magic = bytes([0, 0, UINT8, num_axes])
    if not content.startswith(magic):
        raise DatasetError(f"An idx file of {num_axes} axes begins with {magic.hex()}. Got {content[:4].hex()!r}.")
    start = 4 + 4 * num_axes
    if len(content) < start:
        raise DatasetError(f"An idx header of {num_axes} axes is {start} bytes long. Got {len(content)} bytes in all.")
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DatasetError(
            f"An idx file of shape {shape} holds {math.prod(shape)} bytes after its header. Got {len(content) - start}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
