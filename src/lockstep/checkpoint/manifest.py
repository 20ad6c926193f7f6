"""The manifest's text: JSON for people, with a checksum of every other byte of it.

The first two lines, the number of the format and the checksum, stay as they are in
every format to come, so that a file from the future is known for one.

A checksum protects against damage, not against a forger. So what would take much
memory or time to parse is refused by its bytes, before it is parsed.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from lockstep.errors import StateError

FORMAT = 1
# Together these keep the cost of a forged manifest below 64 MB and a second.
MAX_BYTES = 2**23
MAX_VALUES = 300_000  # some 27,000 arrays
MAX_DEPTH = 256  # plain values are nested at most 64 deep, and a tuple or a dict takes up to three levels
_MAX_TEXT = 2**24  # bytes of the decoded text, of which one wide character makes every character wide
_MAX_DIGITS = 32  # of a number; larger integers come as hexadecimal strings
_STRINGS_AND_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
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
    try:
        _check_size(data)
    except ValueError as error:
        raise StateError(f"A checkpoint's manifest is too large: {error}. Keep long lists as arrays.") from None
    return data.replace(_BLANK.encode(), hashlib.sha256(data).hexdigest().encode(), 1)


def load(data: bytes) -> dict[str, Any]:
    """The content of a manifest, verified; `ValueError` where the bytes are not what `dump` gave."""
    match = _HEAD.match(data)
    if match is None:
        raise ValueError("it does not begin as a manifest does")
    start, stop = match.span(2)
    digest = hashlib.sha256(data[:start] + _BLANK.encode())
    digest.update(memoryview(data)[stop:])
    if digest.hexdigest().encode() != match[2]:
        raise ValueError("its checksum is wrong")
    if (number := int(match[1])) > FORMAT:
        raise StateError(
            f"This Lockstep reads checkpoints up to format {FORMAT}. Got one of format {number}. Upgrade Lockstep."
        )
    if number != FORMAT:
        raise ValueError(f"there is no format {number}")
    _check_size(data)
    _check_depth(data)
    try:
        content = json.loads(
            data.decode(), object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    assert isinstance(content, dict)  # it begins with a brace
    del content["format"], content["checksum"]
    return content


def _check_size(data: bytes) -> None:
    """Raises `ValueError` if the text is too large to parse, however it was made."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, and at most {MAX_BYTES} are read")
    width = 4 if re.search(rb"[\xf0-\xff]", data) else 2 if re.search(rb"[\xc4-\xff]", data) else 1
    if width * len(data) > _MAX_TEXT:
        raise ValueError(f"it has {len(data)} bytes with wide characters, and at most {_MAX_TEXT // width} are read")
    num_values = max(sum(map(data.count, (b",", b":", b"[", b"{"))), data.count(b'"') // 4)
    if num_values > MAX_VALUES:
        raise ValueError(f"it has {num_values} values, and at most {MAX_VALUES} are read")


def _check_depth(data: bytes) -> None:
    """Raises `ValueError` if brackets are nested too deep for the parser, whatever the script's recursion limit."""
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(data):
        mark = data[match.start()]
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _int(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    """Raises `ValueError` for a number that takes long to convert, and that `dump` never writes."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")


def _float(text: str) -> float:
    _check_digits(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is too large a number")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
