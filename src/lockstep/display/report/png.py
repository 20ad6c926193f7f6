"""Encodes a small table of levels as a picture, in which each level is the same color with another opacity.

Because of the opacity, the picture can be shown on a light and on a dark page.
"""

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence

NUM_LEVELS = 32
COLOR = (58, 134, 214)
_LEAST_OPACITY = 18  # of 255, so that an empty cell differs from a short time


def encode_levels(rows: Sequence[Sequence[int]]) -> str:
    """Returns the address of a PNG with one pixel for each level; 0 is transparent, NUM_LEVELS is opaque.

    >>> encode_levels([[0, 1], [16, 32]])[:30]
    'data:image/png;base64,iVBORw0K'
    """
    opacities = [0, *(_LEAST_OPACITY + (255 - _LEAST_OPACITY) * n // (NUM_LEVELS - 1) for n in range(NUM_LEVELS))]
    size = struct.pack(
        ">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0
    )  # 8 bits per pixel, which are palette indices
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    chunks = [(b"IHDR", size), (b"PLTE", bytes(COLOR) * len(opacities)), (b"tRNS", bytes(opacities))]
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in [*chunks, (b"IDAT", pixels), (b"IEND", b"")]
    )
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()
