"""The manifest's text: JSON for people, with a checksum of every other byte of it.

The first two lines, the number of the format and the checksum, stay as they are in
every format to come, so that a file from the future is known for one.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from lockstep.errors import StateError

FORMAT = 1
MAX_BYTES = 2**28  # a forged one takes no more memory than this
_BLANK = "0" * 64
_HEAD = re.compile(rb'\{\n  "format": (\d{1,9}),\n  "checksum": "([0-9a-f]{64})"')


def dump(content: Mapping[str, Any]) -> bytes:
    """The manifest's bytes.

    >>> print(dump({"step": 100}).decode())
    {
      "format": 1,
      "checksum": "490e007904865e7a4fadd2b7a42b3e81c0b6203e97e3caddb2bcaaa3a3ed90c1",
      "step": 100
    }
    """
    whole = {"format": FORMAT, "checksum": _BLANK, **content}
    data = json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False).encode()
    if len(data) > MAX_BYTES:
        raise StateError(
            f"A checkpoint's manifest has at most {MAX_BYTES} bytes. Got {len(data)}. Keep long lists as arrays."
        )
    return data.replace(_BLANK.encode(), hashlib.sha256(data).hexdigest().encode(), 1)


def load(data: bytes) -> dict[str, Any]:
    """The content of a manifest, verified; `ValueError` where the bytes are not what `dump` gave."""
    match = _HEAD.match(data)
    if match is None:
        raise ValueError("it does not begin as a manifest does")
    start, stop = match.span(2)
    if hashlib.sha256(data[:start] + _BLANK.encode() + data[stop:]).hexdigest().encode() != match[2]:
        raise ValueError("its checksum is wrong")
    if (number := int(match[1])) > FORMAT:
        raise StateError(
            f"This Lockstep reads checkpoints up to format {FORMAT}. Got one of format {number}. Upgrade Lockstep."
        )
    if number != FORMAT:
        raise ValueError(f"there is no format {number}")
    try:
        content = json.loads(data.decode(), object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    assert isinstance(content, dict)  # it begins with a brace
    del content["format"], content["checksum"]
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is too large a number")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
