"""Encodes the plain values in a checkpoint as strict JSON, and decodes them.

JSON has no tuples, bytes, NaN, large integers or keys that are not strings. Each of these is encoded as an object with
one key that begins with `$`: `{"$tuple": [1, 2]}`. Arrays are returned separately, by name. A decoded value has the
same type and the same bits. Encoding raises for any other type.
"""

import base64
import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.checkpoint.safetensors_file import KINDS, Form
from lockstep.core.types import Array, State
from lockstep.errors import StateError

MAX_DEPTH = 64
PREFIX = "facts."  # the names of arrays inside plain values begin with it, such as `facts.0`
# The types of numpy scalars that can be saved; `longlong` is not one of them.
_SCALARS = {np.dtype(kind.numpy).type: kind.numpy for kind in KINDS}
_NAMED = {kind.dtype: kind for kind in KINDS if kind.dtype == np.dtype(kind.numpy).name}


def encode(tree: Any) -> tuple[Any, State]:
    """Returns a pytree of plain values as JSON, and the arrays in the pytree by name.

    >>> encode({"seen": (1, 2), "loss": float("nan"), "lr": 0.1})
    ({'seen': {'$tuple': [1, 2]}, 'loss': {'$float': 'nan'}, 'lr': 0.1}, {})
    >>> encode({"callbacks": [{"model": object()}]})
    Traceback (most recent call last):
    lockstep.errors.StateError: A checkpoint cannot store the object at callbacks[0]['model'], only numbers, strings, \
bytes, lists, tuples, dicts and arrays. Use values of these types instead.
    """
    arrays: State = {}
    return _encode(tree, "", arrays, 0), arrays


def _encode(value: Any, at: str, arrays: State, depth: int) -> Any:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise StateError(
            f"The value at {at[:100]}… has more than {MAX_DEPTH} nested levels, which a checkpoint cannot store. Use a "
            "value with fewer levels that does not contain itself."
        )
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": _format_float(value)}
    if kind is str:
        return value if is_utf8(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}
    if value is None or kind is bool:
        return value
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is np.ndarray:
        return {"$numpy": _store_array(Array(value, value.dtype.name), at, arrays)}
    if kind is Array:
        return {"$array": _store_array(value, at, arrays)}
    if kind in _SCALARS:
        return {"$scalar": [value.dtype.name, value.astype(_SCALARS[kind]).tobytes().hex()]}
    if kind is list:
        return [_encode(item, f"{at}[{index}]", arrays, depth + 1) for index, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(item, f"{at}[{index}]", arrays, depth + 1) for index, item in enumerate(value)]}
    if kind is dict:
        return _encode_dict(value, at, arrays, depth + 1)
    raise StateError(
        f"A checkpoint cannot store the {kind.__name__} at {at or 'the top'}, only numbers, strings, bytes, lists, "
        "tuples, dicts and arrays. Use values of these types instead."
    )


def _encode_dict(value: dict[Any, Any], at: str, arrays: State, depth: int) -> Any:
    places = [f"{at}[{key!r:.100}]" if at else str(key) for key in value]
    items = [_encode(item, place, arrays, depth) for place, item in zip(places, value.values(), strict=True)]
    if all(type(key) is str and not key.startswith("$") and is_utf8(key) for key in value):
        return dict(zip(value, items, strict=True))
    keys = [_encode(key, f"the key {place}", arrays, depth) for place, key in zip(places, value, strict=True)]
    return {"$dict": [[key, item] for key, item in zip(keys, items, strict=True)]}


def _store_array(array: Array, at: str, arrays: State) -> str:
    if type(array.data) is not np.ndarray:
        raise StateError(
            f"The data of an Array must be a numpy array. Got a {type(array.data).__name__} at {at}. Convert it with "
            "np.asarray."
        )
    Form.from_array(array, at)
    name = f"{PREFIX}{len(arrays)}"
    arrays[name] = array
    return name


def decode(value: Any, arrays: State) -> Any:
    """Returns the pytree that `encode` has converted to this JSON and these arrays; raises `ValueError` otherwise.

    >>> decode({"seen": {"$tuple": [1, 2]}, "big": {"$int": "0x10000000000000000"}}, {})
    {'seen': (1, 2), 'big': 18446744073709551616}
    """
    left = dict(arrays)
    result = _decode(value, left, 0)
    if left:
        raise ValueError(f"no value refers to the array {min(left)!r:.100}")
    return result


def _decode(value: Any, arrays: State, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("the values are nested too deeply")
    if isinstance(value, list):
        return [_decode(item, arrays, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, arrays, depth + 1) for key, item in value.items()}
    (tag, inner), *more = value.items()
    if more:
        raise ValueError(f"the key {tag!r:.50} must be the only one in its JSON object")
    if tag in _TEXTS:
        return _TEXTS[tag](_check_type(tag, inner, str))
    if tag in ("$numpy", "$array"):
        array = arrays.pop(_check_type(tag, inner, str), None)
        if array is None or (tag == "$numpy" and array.dtype != array.data.dtype.name):
            raise ValueError(
                f"the array {inner!r:.100} of a {tag!r} is missing, has a type that numpy lacks, or is used twice"
            )
        return array.data if tag == "$numpy" else array
    if tag == "$tuple":
        return tuple(_decode(item, arrays, depth + 1) for item in _check_type(tag, inner, list))
    if tag == "$scalar":
        return _decode_scalar(*_check_pair(tag, inner))
    if tag == "$dict":
        pairs = [_check_pair(tag, pair) for pair in _check_type(tag, inner, list)]
        return _make_dict([(_decode(key, arrays, depth + 1), _decode(item, arrays, depth + 1)) for key, item in pairs])
    raise ValueError(f"the key {tag!r:.50} names no kind of value")


def _make_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        result = dict(pairs)
    except TypeError as error:  # a list as a key
        raise ValueError(f"a key of '$dict' is not valid: {error}") from error
    if len(result) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"a '$dict' has the key {key!r:.100} twice")
    return result


def _decode_scalar(name: Any, digits: Any) -> Any:
    held = _NAMED.get(name) if isinstance(name, str) else None
    data = bytes.fromhex(_check_type("$scalar", digits, str))
    if held is None or len(data) != held.itemsize:
        raise ValueError(f"there is no scalar {name!r:.50} of {len(data)} bytes")
    return np.frombuffer(data, held.numpy)[0]


def _check_type(tag: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(
            f"the value of {tag!r} must be of type {kind.__name__}, but {value!r:.50} is of type {type(value).__name__}"
        )
    return value


def _check_pair(tag: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r:.50} in {tag!r} is not a list of two values")
    return value[0], value[1]


def is_utf8(text: str) -> bool:
    """Returns whether the text can be encoded as UTF-8: it cannot if it contains a lone surrogate."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _format_float(value: float) -> str:
    """Returns `inf`, `-inf` or `nan`, or the bits of any other NaN, such as the negative NaN of 0/0 on x86."""
    bits = struct.pack(">d", value)
    return repr(value) if struct.pack(">d", float(repr(value))) == bits else f"0x{bits.hex()}"


def _parse_float(text: str) -> float:
    if not text.startswith("0x"):
        return float(text)
    bits = bytes.fromhex(text[2:])
    if len(bits) != 8:
        raise ValueError(f"{text!r:.50} is not a float")
    return float(struct.unpack(">d", bits)[0])


_TEXTS: dict[str, Callable[[str], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": _parse_float,
    "$str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
}
