"""Writes and reads the text of a checkpoint's manifest: indented JSON with a checksum of all other bytes.

The first lines, with the format number and the checksum, will be the same in every later format, so that this version
recognizes a newer file.

The checksum detects damage, but not a forged manifest. So `load` refuses a text that would take much memory or time to
parse.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lockstep.errors import StateError

FORMAT = 1
# Together these keep the cost of a forged manifest below 64 MB and a second.
MAX_BYTES = 2**23
MAX_VALUES = 300_000  # about 27,000 arrays
MAX_DEPTH = 256  # plain values are nested at most 64 deep, and a tuple or a dict takes up to three levels
_MAX_TEXT = 2**24  # bytes of the decoded text, in which one wide character makes every character wide
_MAX_DIGITS = 32  # in a number; larger integers are written as hexadecimal strings
_STRINGS_AND_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_BLANK = "0" * 64
_HEAD = re.compile(rb'\{\n  "format": (\d{1,9}),\n  "checksum": "([0-9a-f]{64})"')


def dump(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest with this content, the format number and a checksum.

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
        raise StateError(
            f"The checkpoint's manifest.json would be too large to be read again: {error}. Store long lists, such as "
            "those in a callback's state, as numpy arrays."
        ) from None
    return data.replace(_BLANK.encode(), hashlib.sha256(data).hexdigest().encode(), 1)


def load(data: bytes) -> dict[str, Any]:
    """Returns the content of a manifest; raises `ValueError` if the bytes are not what `dump` returned."""
    match = _HEAD.match(data)
    if match is None:
        raise ValueError("the first lines of the file are not those of a manifest")
    start, stop = match.span(2)
    digest = hashlib.sha256(data[:start] + _BLANK.encode())
    digest.update(memoryview(data)[stop:])
    if digest.hexdigest().encode() != match[2]:
        raise ValueError("the checksum of the file is wrong")
    if (number := int(match[1])) > FORMAT:
        raise StateError(
            f"The checkpoint has format {number}, and this version of Lockstep reads formats up to {FORMAT}. Upgrade "
            "Lockstep."
        )
    if number != FORMAT:
        raise ValueError(f"the format number {number} is not valid")
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
        raise ValueError("the values are nested too deeply") from error
    assert isinstance(content, dict)  # it begins with a brace
    del content["format"], content["checksum"]
    return content


def _check_size(data: bytes) -> None:
    """Raises `ValueError` if the text is too large to parse."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"the text can have at most {MAX_BYTES} bytes, got {len(data)}")
    width = 4 if re.search(rb"[\xf0-\xff]", data) else 2 if re.search(rb"[\xc4-\xff]", data) else 1
    if width * len(data) > _MAX_TEXT:
        raise ValueError(f"a text with wide characters can have at most {_MAX_TEXT // width} bytes, got {len(data)}")
    num_values = max(sum(map(data.count, (b",", b":", b"[", b"{"))), data.count(b'"') // 4)
    if num_values > MAX_VALUES:
        raise ValueError(f"the text can have at most {MAX_VALUES} values, got {num_values}")


def _check_depth(data: bytes) -> None:
    """Raises `ValueError` if brackets are nested too deeply for the JSON parser, at any recursion limit."""
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(data):
        mark = data[match.start()]
        depth += (mark in b"[{") - (mark in b"]}")
        if depth > MAX_DEPTH:
            raise ValueError("the values are nested too deeply")


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"a JSON object has the key {key!r:.100} twice")
    return result


def _parse_int(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    """Raises `ValueError` for a number with too many digits, which would take long to convert."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number can have at most {_MAX_DIGITS} digits, got {len(text)}")


def _parse_float(text: str) -> float:
    _check_digits(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is too large a number")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
