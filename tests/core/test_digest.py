"""Digests differ for any difference of bits, type, shape, name or step."""

import tracemalloc

import numpy as np
import pytest

from lockstep.core import digest
from lockstep.core.types import Array, LazyState, to_array

ZEROS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    "other",
    [
        Array(-ZEROS, "float32"),  # -0.0 == 0.0, but not to the bit
        Array(ZEROS.reshape(3, 2), "float32"),
        Array(ZEROS.view(np.int32), "int32"),
        Array(ZEROS, "python"),
    ],
)
def test_sign_shape_and_type_count(other):
    (one,), (two,) = (digest.hash_arrays({"w": array}).values() for array in (Array(ZEROS, "float32"), other))
    assert one != two


def test_memory_order_does_not_count():
    values = np.arange(6.0).reshape(2, 3)
    arrays = {"c": Array(values, "float64"), "f": Array(np.asfortranarray(values), "float64")}
    found = digest.hash_arrays(arrays)
    assert found["c"] == found["f"]


@pytest.mark.parametrize(
    ("digests", "step"),
    [({"a": "1", "b": "3"}, 3), ({"a": "1", "c": "2"}, 3), ({"a": "1"}, 3), ({"a": "1", "b": "2"}, 4)],
)
def test_the_state_digest_depends_on_names_values_and_step(digests, step):
    assert digest.hash_state(digests, step) != digest.hash_state({"a": "1", "b": "2"}, 3)


def test_digests_of_several_copies():
    """Also where the first copy's are taken over: -0.0 equals 0.0 and has other bytes."""
    zeros = np.zeros(2, np.float32)
    first = {"a": Array(zeros, "float32"), "b": Array(np.arange(3), "int64")}
    copies = [
        first,
        {name: Array(array.data.copy(), array.dtype) for name, array in first.items()},
        {**first, "a": Array(-zeros, "float32")},
        {**first, "a": Array(zeros.reshape(2, 1), "float32")},
        {**first, "a": Array(zeros, "bfloat16")},
        {**first, "c": Array(zeros, "float32")},
    ]
    assert list(digest.hash_copies(copies)) == [digest.hash_arrays(copy) for copy in copies]
    assert [each["a"] == digest.hash_arrays(first)["a"] for each in digest.hash_copies(copies)] == [1, 1, 0, 0, 0, 1]


def test_lazy_copies_are_read_array_by_array():
    """In memory are an array of the first copy, the one that is compared with it, and the result of that."""
    sources = {str(index): np.full(1 << 18, index, np.float32) for index in range(16)}
    tracemalloc.start()
    try:
        digests = digest.hash_copies([LazyState(sources, to_array) for _ in range(3)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digests == 3 * [digest.hash_arrays(LazyState(sources, to_array))]
    assert peak < 3.2 * sources["0"].nbytes
