"""The array functions of every framework for losses and metrics, beside numpy's.

LOCKSTEP_BACKENDS chooses the frameworks."""

import importlib

import numpy as np
import pytest

from backends.test_contract import KITS
from lockstep.backends.numpy import array_ops as numpy_ops

OPS = {
    name: importlib.import_module(f"{kit.module.__name__}.array_ops")
    for name, kit in KITS.items()
    if name != "keras"  # has those of what it runs on
}
A = np.array([[1.5, -2.0, 4.0, 0.0], [0.25, 8.0, -1.0, 7.0], [3.0, 2.0, 1.0, 0.5]])
LABELS = np.array([2, 3, 0])
WEIGHTS = np.array([0.5, 0.0, 2.0])

CALLS = [
    ("reshape", lambda ops, a: ops.reshape(a(A), (4, 3))),
    ("double", lambda ops, a: ops.double(a(LABELS))),
    ("cast_like", lambda ops, a: ops.cast_like(a(LABELS), a(A))),
    ("average", lambda ops, a: ops.average(a(A[:2]))),
    ("average_rows", lambda ops, a: ops.average_rows(a(A), 3)),
    ("average_rows of a vector", lambda ops, a: ops.average_rows(a(WEIGHTS), 3)),
    ("total", lambda ops, a: ops.total(a(A))),
    ("scale", lambda ops, a: ops.scale(a(A), 0.125)),
    ("divide", lambda ops, a: ops.divide(ops.total(a(A)), 4.0)),
    ("as_weight", lambda ops, a: ops.as_weight(ops.total(a(WEIGHTS)))),
    ("any_nonzero", lambda ops, a: ops.any_nonzero(a(WEIGHTS))),
    ("any_nonzero of zeros", lambda ops, a: ops.any_nonzero(a(WEIGHTS * 0))),
    ("is_finite_nonzero", lambda ops, a: ops.is_finite_nonzero(ops.total(a(WEIGHTS)))),
    ("is_finite_nonzero of 0", lambda ops, a: ops.is_finite_nonzero(ops.total(a(WEIGHTS * 0)))),
    ("is_finite_nonzero of NaN", lambda ops, a: ops.is_finite_nonzero(ops.total(a(WEIGHTS * np.nan)))),
    ("where", lambda ops, a: ops.where(ops.equal(a(LABELS), 2), a(WEIGHTS), 0)),
    ("argmax", lambda ops, a: ops.argmax(a(A), -1)),
    ("argmax on the first axis", lambda ops, a: ops.argmax(a(A), 0)),
    ("has_in_top", lambda ops, a: ops.has_in_top(a(A), a(LABELS), 1, 1)),
    ("has_in_top of two", lambda ops, a: ops.has_in_top(a(A), a(LABELS), 2, 1)),
    ("equal", lambda ops, a: ops.equal(ops.argmax(a(A), 1), a(LABELS))),
    ("count_true", lambda ops, a: ops.count_true(ops.equal(a(LABELS), a(WEIGHTS)))),
]


def convert(name, value):
    """A framework's own array."""
    if name == "mxnet":
        mx = importlib.import_module("mxnet")
        return mx.nd.array(value, dtype=value.dtype)
    if name == "torch":
        return importlib.import_module("torch").tensor(value)
    return OPS[name].as_array(value)


@pytest.mark.parametrize("name", [name for name in OPS if name != "numpy"])
@pytest.mark.parametrize(("case", "call"), CALLS, ids=[case for case, _ in CALLS])
def test_every_function_gives_what_numpy_gives(name, case, call):
    if name == "mxnet" and case.startswith("any_nonzero"):
        found = call(OPS[name], lambda value: value)  # MXNet asks that of numbers on the host
    else:
        found = call(OPS[name], lambda value: convert(name, value))
    expected = call(numpy_ops, lambda value: value)
    found = OPS[name].to_host(found) if OPS[name].is_array(found) else found
    np.testing.assert_array_equal(np.reshape(np.asarray(found, float), np.shape(expected)), np.asarray(expected, float))


@pytest.mark.parametrize("name", OPS)
def test_arrays_are_known_and_come_back(name):
    ops = OPS[name]
    array = convert(name, A)
    assert ops.is_array(array)
    assert not ops.is_array("text")
    assert not ops.is_array(None)
    assert ops.shape(array) == (3, 4)
    assert ops.shape(ops.total(array)) == ()
    np.testing.assert_array_equal(ops.to_host(array), A)
    np.testing.assert_array_equal(np.asarray(ops.as_array([1.0, 0.5])), [1.0, 0.5])
