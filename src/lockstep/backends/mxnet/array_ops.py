"""MXNet's arrays on its contexts, `mx.nd` and `mx.np` alike.

Shapes are numpy's while they are copied: without `npx.set_np()` MXNet takes a length of 0 for one not known yet.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mxnet import MXNetError, autograd, nd
from mxnet.util import np_shape

from lockstep.backends.mxnet import arrays
from lockstep.backends.mxnet.arrays import classic, dtype_of
from lockstep.backends.mxnet.inputs import put
from lockstep.backends.mxnet.replicas import context_of


def copy(array: Any, device: str) -> Any:
    """A copy with room for its gradient."""
    with autograd.pause(), np_shape(True):
        fresh = array.copyto(context_of(device))
        fresh.attach_grad()
    return fresh


def cut(array: Any, where: Any, device: str) -> Any:
    """A copy of some examples."""
    with np_shape(True):
        return (array if where is ... else array[where]).copyto(context_of(device))


def absent(array: Any) -> str:
    """A parameter has its values in arrays, one on each of its contexts."""
    return "" if is_array(array) else f"a {type(array).__name__}. Give its .data() or its .grad()"


def check(array: Any) -> str:
    """A value that was recorded would no longer be what the backward pass takes it for."""
    try:
        recorded = autograd.get_symbol(array).get_children() is not None
    except MXNetError:  # not even a variable
        recorded = False
    return "an array that autograd has recorded. Give its .detach(), or the .grad of the parameters" if recorded else ""


def add(left: Any, right: Any) -> Any:
    """The addition of the left array's context."""
    with autograd.pause(), np_shape(True):
        return left + (right if right.ctx == left.ctx else right.copyto(left.ctx))


def widen(array: Any) -> Any:
    """A copy as an `mx.nd` array."""
    wide = "float32" if dtype_of(array) in ("float16", "bfloat16") else dtype_of(array)
    with autograd.pause(), np_shape(True):
        return classic(array).astype(wide)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """In place, each operation in a kernel of its own."""
    with autograd.pause(), np_shape(True):
        for average, value in zip(averages, values, strict=True):
            average *= decay
            average += classic(value).astype(average.dtype) * (1 - decay)
    return averages


def to_numpy(array: Any) -> Any:
    """A copy on the host."""
    return classic(array).asnumpy()


def from_numpy(data: Any, like: Any) -> Any:
    """A copy on the context."""
    with np_shape(True):
        return nd.array(data, ctx=like.ctx, dtype=data.dtype)


def write(value: Any, target: Any) -> Any:
    """In place."""
    with autograd.pause(), np_shape(True):
        return target if value is target else value.copyto(target)


def is_array(value: Any) -> bool:
    """Of either class."""
    return arrays.is_array(value)


def as_array(value: Any) -> Any:
    """Numbers stay on the host, in float64."""
    return value if is_array(value) else np.asarray(value, "float64")


def to_host(array: Any) -> Any:
    """Waits for what writes to the array."""
    return array.asnumpy() if is_array(array) else array


def shape(array: Any) -> tuple[int, ...]:
    """A vector of one is a number: `mx.nd` has no other."""
    return () if array.size == 1 else tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """A view if there is one."""
    return classic(array).reshape(shape)


def double(array: Any) -> Any:
    """float64; also of numbers on the host."""
    return classic(array).astype("float64", copy=False) if is_array(array) else np.float64(array)


def cast_like(value: Any, array: Any) -> Any:
    """Numbers of the host are brought to the other's context."""
    dtype = dtype_of(array)
    return value.astype(dtype) if is_array(value) else put(np.asarray(value).astype(dtype), array.ctx, wide=True)


def average(array: Any) -> Any:
    """MXNet's mean."""
    return array.mean()


def average_rows(array: Any, examples: int) -> Any:
    """A vector stays as it is."""
    if array.size == examples:
        return array.reshape((examples,))
    return array.reshape((examples, -1)).mean(axis=1)


def total(array: Any) -> Any:
    """MXNet's sum."""
    return array.sum()


def scale(array: Any, factor: Any) -> Any:
    """By a plain number."""
    return array * factor


def divide(array: Any, by: Any) -> Any:
    """By a plain number, which is waited for; by 1 instead of 0."""
    return array / (as_weight(by) or 1.0)


def as_weight(value: Any) -> Any:
    """A plain number, which is waited for: whether anything counts decides what is computed."""
    return float(to_host(value))


def as_column(weights: Any, values: Any) -> Any:
    """On the host."""
    return weights.reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """By a plain condition one of the two; else one of the last two may be a number."""
    if isinstance(condition, bool):
        return array if condition else other
    like = array if is_array(array) else other
    return nd.where(condition, *(each if is_array(each) else nd.ones_like(like) * each for each in (array, other)))


def any_nonzero(array: Any) -> Any:
    """Of numbers on the host."""
    return bool(array.any())


def is_finite_nonzero(value: Any) -> Any:
    """Waits for the number."""
    number = as_weight(value)
    return math.isfinite(number) and number != 0


def is_short(array: Any) -> bool:
    """A sum over the examples rounds no share."""
    return False


def argmax(array: Any, axis: int) -> Any:
    """In float64."""
    return double(nd.argmax(classic(array), axis=axis))


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """MXNet's topk."""
    best = nd.topk(classic(array), k=num, axis=axis, dtype="float64")
    return nd.broadcast_equal(best, double(labels).expand_dims(axis)).max(axis=axis)


def equal(left: Any, right: Any) -> Any:
    """In float64."""
    return double(left) == (double(right) if is_array(right) else right)


def count_true(array: Any) -> Any:
    """In float64."""
    return arrays.total(array)


def list_values(parts: Iterable[tuple[Any, float]]) -> list[Any]:
    """Numbers, and vectors in float64, each times a plain number."""
    result = []
    for value, times in parts:
        values = [arrays.flat(double(value))] if is_array(value) else np.asarray(value, "float64").reshape(-1).tolist()
        result += [each if times == 1 else each * times for each in values]
    return result
