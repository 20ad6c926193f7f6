"""The text of the manifest: indented JSON, with a checksum of all other bytes.

The first two lines, the number of the format and the checksum, will be the same in every later format, so that a newer
file is recognized as one.

A checksum protects against damage, not against forgery. So a text that would take much memory or time to parse is
refused before it is parsed.
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
MAX_VALUES = 300_000  # about 27,000 arrays
MAX_DEPTH = 256  # plain values are nested at most 64 deep, and a tuple or a dict takes up to three levels
_MAX_TEXT = 2**24  # bytes of the decoded text: a single wide character makes every character wide
_MAX_DIGITS = 32  # of a number; larger integers are written as hexadecimal strings
_STRINGS_AND_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_BLANK = "0" * 64
_HEAD = re.compile(rb'\{\n  "format": (\d{1,9}),\n  "checksum": "([0-9a-f]{64})"')


def dump(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest.

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
        raise StateError(f"The checkpoint's manifest is too large: {error}. Use arrays for long lists.") from None
    return data.replace(_BLANK.encode(), hashlib.sha256(data).hexdigest().encode(), 1)


def load(data: bytes) -> dict[str, Any]:
    """Verify and parse a manifest; raise `ValueError` if the bytes are not what `dump` returned."""
    match = _HEAD.match(data)
    if match is None:
        raise ValueError("its first lines are not those of a manifest")
    start, stop = match.span(2)
    digest = hashlib.sha256(data[:start] + _BLANK.encode())
    digest.update(memoryview(data)[stop:])
    if digest.hexdigest().encode() != match[2]:
        raise ValueError("its checksum is wrong")
    if (number := int(match[1])) > FORMAT:
        raise StateError(
            f"The checkpoint has format {number}, and this Lockstep reads formats up to {FORMAT}. Upgrade Lockstep."
        )
    if number != FORMAT:
        raise ValueError(f"there is no format {number}")
    _check_size(data)
    _check_depth(data)
    try:
        content = json.loads(
            data.decode(),
            object_pairs_hook=_make_dict,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    assert isinstance(content, dict)  # it begins with a brace
    del content["format"], content["checksum"]
    return content


def _check_size(data: bytes) -> None:
    """Raise `ValueError` if the text is too large to parse."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, and at most {MAX_BYTES} are read")
    width = 4 if re.search(rb"[\xf0-\xff]", data) else 2 if re.search(rb"[\xc4-\xff]", data) else 1
    if width * len(data) > _MAX_TEXT:
        raise ValueError(f"it has {len(data)} bytes with wide characters, and at most {_MAX_TEXT // width} are read")
    num_values = max(sum(map(data.count, (b",", b":", b"[", b"{"))), data.count(b'"') // 4)
    if num_values > MAX_VALUES:
        raise ValueError(f"it has {num_values} values, and at most {MAX_VALUES} are read")


def _check_depth(data: bytes) -> None:
    """Raise `ValueError` if brackets are nested too deep for the parser, whatever the recursion limit."""
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(data):
        mark = data[match.start()]
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deep")


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _parse_int(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    """Raise `ValueError` for a number that takes long to convert, which `dump` never writes."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")


def _parse_float(text: str) -> float:
    _check_digits(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is too large a number")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
