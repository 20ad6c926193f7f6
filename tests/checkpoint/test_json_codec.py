"""Plain values come back equal in type and value, to the bit; anything else is refused by its place."""

import enum
import json
import re
import struct
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from checkpoint.samples import DTYPES, same
from lockstep.checkpoint import json_codec, safetensors_file
from lockstep.checkpoint.json_codec import decode, encode
from lockstep.core.types import Array
from lockstep.errors import StateError

dtypes = st.sampled_from(DTYPES).map(np.dtype)
bits = st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack("<d", raw)[0])  # every NaN there is
text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # lone surrogates too
scalars = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, (1,))).map(lambda array: array[0])
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | bits | text | st.binary(max_size=8) | scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
named = arrays.map(lambda data: Array(data, str(data.dtype))) | st.builds(
    Array, hnp.arrays("int16", (3,)).map(lambda bits: bits.view(ml_dtypes.bfloat16)), st.just("bfloat16")
)
leaves = keys | st.integers(-(2**4000), 2**4000) | arrays | named
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text | st.sampled_from(["$int", "$"]), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(nests)
def test_values_round_trip(nest):
    value, aside = encode(nest)
    words = json.dumps(value, allow_nan=False)
    assert same(decode(json.loads(words), aside), nest)


@pytest.mark.parametrize(
    "value",
    [
        *(10**5000, -(10**5000), 2**63, -(2**63), -(2**63) - 1),  # beyond what int() reads in decimal
        *(-0.0, 5e-324, 1.7976931348623157e308, 1e22, float("-inf")),
        *("\ud800\udc00", "\U00010000", "\ud800", "", "\0", "é"),  # two surrogates are not the one character
        *({"$int": 1}, {1: 2, "1": 3}, {True: 0, None: 1, (1, (2.0,)): 2}, {}, [], (), ((),), b"", b"\xff"),
        *(
            {float("nan"): 1},
            {np.float32(1): np.int8(-1)},
            np.bool_(True),
            np.float64("nan"),
            np.uint64(2**64 - 1),
            ml_dtypes.bfloat16(1.5),
        ),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else value.bit_length(),
)
def test_edge_cases_round_trip(value):
    words, aside = encode(value)
    assert same(decode(json.loads(json.dumps(words, allow_nan=False)), aside), value)


def test_arrays_in_any_memory_order_round_trip():
    array = np.arange(24.0).reshape(2, 3, 4)
    assert same(decode(*encode(array.T[::2, 1:])), array.T[::2, 1:])


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (Colour.RED, "Colour"),  # an int, but would come back as another
        (1j, "complex"),
        ({1}, "set"),
        (OrderedDict(), "OrderedDict"),
        (np.longdouble(1), f"{np.longdouble.__name__}"),  # each numpy has its own name for it
        (np.str_("x"), "str_"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (np.array([None]), "object"),
        (np.array(["x"]), "str"),
        (np.zeros(2, ">f4"), "float32"),
        (np.zeros(2, [("x", "f4")]), "void"),
        (Array(np.zeros(2), "bfloat16"), "bfloat16 in float64"),
        (Array(np.zeros(1), "python"), "python in float64"),  # a number has no axes
        (Array([1.0], "float64"), "list"),
    ],
    ids=repr,
)
def test_an_error_names_the_place_of_a_value_that_is_not_plain(value, kind):
    with pytest.raises(StateError) as caught:
        encode({"callbacks": [0, {"x": (1, value)}]})
    assert re.search(rf"(store|store the|a) {kind}[(),\d]* at callbacks\[1\]\['x'\]\[1\]", str(caught.value))


def test_an_array_of_the_most_axes_round_trips():
    most = np.zeros((1,) * safetensors_file.MAX_AXES)
    assert same(decode(*encode(most)), most)


def test_an_array_of_too_many_axes_raises(monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_AXES", 2)  # numpy 1 cannot make an array of 33 axes
    assert encode({"x": np.zeros((1, 1))})
    with pytest.raises(StateError, match=r"cannot store float64 at x,"):
        encode({"x": np.zeros((1, 1, 1))})


def test_a_key_that_is_not_plain_raises():
    with pytest.raises(StateError, match=r"cannot store the frozenset at the key seen\[frozenset"):
        encode({"seen": {frozenset(): 1}})


def test_a_value_that_contains_itself_raises():
    value = []
    value.append(value)
    with pytest.raises(StateError, match="has more than 64 nested levels"):
        encode({"x": value})


def test_the_deepest_value_round_trips():
    value = 1
    for _ in range(json_codec.MAX_DEPTH):
        value = (value,)
    assert same(decode(*encode(value)), value)
    with pytest.raises(StateError):
        encode((value,))


@pytest.mark.parametrize(
    "value",
    [
        *({"$int": 1}, {"$int": "x"}, {"$int": "0x1", "a": 2}, {"$what": 1}, {"$": 1}, {"$float": "0x00"}),
        *({"$float": "one"}, {"$str": "zz"}, {"$str": "ff"}, {"$bytes": "*"}, {"$bytes": None}, {"$tuple": "ab"}),
        *({"$dict": [[1]]}, {"$dict": {}}, {"$dict": [[[], 1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$dict": [[1, 2, 3]]}),
        *({"$scalar": ["float32", "00"]}, {"$scalar": [[], "00"]}, {"$scalar": []}),
        *({"$scalar": ["object", "0000000000000000"]}, {"$scalar": ["float32", 0]}, {"$scalar": ["float32", "é"]}),
        *({"$numpy": "facts.1"}, {"$numpy": []}, {"$array": {}}, {"$numpy": "facts.short"}),
        [{"$numpy": "facts.0"}, {"$numpy": "facts.0"}],  # one array in two places
        1,  # and an array in none
    ],
    ids=repr,
)
def test_json_that_was_not_encoded_here_raises(value):
    speaks = value == 1 or "facts" in repr(value)
    aside = {"facts.0": Array(np.zeros(1), "float64"), "facts.short": Array(np.asarray(1), "python")}
    with pytest.raises(ValueError):  # noqa: PT011
        decode(value, aside if speaks else {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"$tuple": "ab"}, "the value of '$tuple' must be of type list, but 'ab' is of type str"),
        ({"$dict": [[1]]}, "[1] in '$dict' is not a list of two values"),
        ({"$dict": [[1, 2], [3, 4], [3, 5]]}, "a '$dict' has the key 3 twice"),
        ({"$int": "0x1", "a": 2}, "the key '$int' must be the only one in its JSON object"),
        ({"$what": 1}, "the key '$what' names no kind of value"),
        (
            {"$array": "facts.1"},
            "the array 'facts.1' of a '$array' is missing, has a type that numpy lacks, or is used twice",
        ),
    ],
)
def test_an_error_names_the_key(value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode(value, {})


def test_json_that_is_nested_too_deep_raises():
    value = 1
    for _ in range(500):
        value = [value]
    with pytest.raises(ValueError, match="too deep"):
        decode(value, {})
