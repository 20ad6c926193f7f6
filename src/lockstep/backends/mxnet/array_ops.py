"""The array functions for MXNet, for `mx.nd` and `mx.np` arrays.

Arrays are copied with numpy's rules for shapes: without `npx.set_np()` MXNet takes a length of 0 as unknown.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mxnet import MXNetError, autograd, nd
from mxnet.util import np_shape

from lockstep.backends.mxnet import arrays
from lockstep.backends.mxnet.arrays import as_nd, get_dtype
from lockstep.backends.mxnet.inputs import put
from lockstep.backends.mxnet.replicas import parse_context


def copy(arrays: Sequence[Any], device: str) -> list[Any]:
    """Returns copies of the arrays on the device, with memory for their gradients."""
    with autograd.pause(), np_shape(True):
        copies = [array.copyto(parse_context(device)) for array in arrays]
        for fresh in copies:
            fresh.attach_grad()
    return copies


def cut(array: Any, where: Any, device: str) -> Any:
    """Returns a copy of the examples `array[where]` on the device."""
    with np_shape(True):
        return (array if where is ... else array[where]).copyto(parse_context(device))


def absent(array: Any) -> str:
    """Returns why a parameter has no value: it has an array on each context. Returns an empty string for an array."""
    return "" if is_array(array) else f"a {type(array).__name__}. Give its .data() or its .grad()"


def check(array: Any) -> str:
    """Returns why a sum cannot replace a recorded array: its backward pass would use the sum. Else an empty string."""
    try:
        recorded = autograd.get_symbol(array).get_children() is not None
    except MXNetError:  # autograd does not know the array
        recorded = False
    return "an array that autograd has recorded. Give its .detach(), or the .grad of the parameters" if recorded else ""


def add(left: Any, right: Any) -> Any:
    """Returns left + right on the left array's context."""
    with autograd.pause(), np_shape(True):
        return left + (right if right.ctx == left.ctx else right.copyto(left.ctx))


def widen(array: Any) -> Any:
    """Returns a copy in at least float32, as an `mx.nd` array."""
    wide = "float32" if get_dtype(array) in ("float16", "bfloat16") else get_dtype(array)
    with autograd.pause(), np_shape(True):
        return as_nd(array).astype(wide)


def update_averages(averages: Sequence[Any], values: Sequence[Any], decay: float) -> Sequence[Any]:
    """Sets each average to decay * average + (1 - decay) * value, in place, each operation in its own kernel."""
    with autograd.pause(), np_shape(True):
        for average, value in zip(averages, values, strict=True):
            average *= decay
            average += as_nd(value).astype(average.dtype) * (1 - decay)
    return averages


def to_numpy(array: Any) -> Any:
    """Returns a numpy copy of the array."""
    return as_nd(array).asnumpy()


def from_numpy(data: Any, like: Any) -> Any:
    """Returns a copy of a numpy array on the context of `like`."""
    with np_shape(True):
        return nd.array(data, ctx=like.ctx, dtype=data.dtype)


def write(value: Any, target: Any) -> Any:
    """Writes the value into the target and returns the target."""
    with autograd.pause(), np_shape(True):
        return target if value is target else value.copyto(target)


def is_array(value: Any) -> bool:
    """Returns whether this is an array of `mx.nd` or `mx.np`."""
    return arrays.is_array(value)


def as_array(value: Any) -> Any:
    """Returns numbers as a float64 array on the host, and an array as it is."""
    return value if is_array(value) else np.asarray(value, "float64")


def to_host(array: Any) -> Any:
    """Waits for the array's value and returns it in numpy; returns a value of the host as it is."""
    return array.asnumpy() if is_array(array) else array


def shape(array: Any) -> tuple[int, ...]:
    """Returns the array's shape; () if it has one element, because `mx.nd` has no arrays without axes."""
    return () if array.size == 1 else tuple(array.shape)


def reshape(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns a view of the array in another shape."""
    return as_nd(array).reshape(shape)


def double(array: Any) -> Any:
    """Returns an array in float64 on its context, or a number in float64 on the host."""
    return as_nd(array).astype("float64", copy=False) if is_array(array) else np.float64(array)


def cast_like(value: Any, array: Any) -> Any:
    """Returns an array in the dtype of `array`; copies numbers of the host to the context of `array`, too."""
    dtype = get_dtype(array)
    return value.astype(dtype) if is_array(value) else put(np.asarray(value).astype(dtype), array.ctx, wide=True)


def average(array: Any) -> Any:
    """Returns the mean of all elements, in the array's dtype."""
    return array.mean()


def average_rows(array: Any, examples: int) -> Any:
    """Returns the mean of each example's elements; a vector with one element per example as it is."""
    if array.size == examples:
        return array.reshape((examples,))
    return array.reshape((examples, -1)).mean(axis=1)


def total(array: Any) -> Any:
    """Returns the sum of all elements."""
    return array.sum()


def scale(array: Any, factor: Any) -> Any:
    """Returns array * factor, for a Python number `factor`."""
    return array * factor


def divide(array: Any, by: Any) -> Any:
    """Returns array / by, for a number `by` on the host; divides by 1 if `by` is 0, as the result is not used."""
    return array / (as_weight(by) or 1.0)


def as_weight(value: Any) -> Any:
    """Waits for a weight and returns it as a Python number, because the host must know whether it is 0."""
    return float(to_host(value))


def as_column(weights: Any, values: Any) -> Any:
    """Returns weights of the host in the shape (examples, 1, ...), so that they broadcast over `values`."""
    return weights.reshape(-1, *[1] * (values.ndim - 1))


def where(condition: Any, array: Any, other: Any) -> Any:
    """Returns `array` where the condition is true, else `other`: as a whole for a Python bool, else by element.

    If the elements are chosen one by one, either `array` or `other` may be a number.
    """
    if isinstance(condition, bool):
        return array if condition else other
    like = array if is_array(array) else other
    return nd.where(condition, *(each if is_array(each) else nd.ones_like(like) * each for each in (array, other)))


def any_nonzero(array: Any) -> Any:
    """Returns whether any element of an array on the host is not 0."""
    return bool(array.any())


def is_finite_nonzero(value: Any) -> Any:
    """Waits for a scalar, and returns whether it is finite and not 0."""
    number = as_weight(value)
    return math.isfinite(number) and number != 0


def is_short(array: Any) -> bool:
    """Returns False: gradients are sums over examples and are not scaled, so no scaled gradient would be rounded."""
    return False


def argmax(array: Any, axis: int) -> Any:
    """Returns the positions of the largest elements on the axis, in float64."""
    return double(nd.argmax(as_nd(array), axis=axis))


def has_in_top(array: Any, labels: Any, num: int, axis: int) -> Any:
    """Returns whether each label is among the `num` largest elements on the axis, by MXNet's topk."""
    best = nd.topk(as_nd(array), k=num, axis=axis, dtype="float64")
    return nd.broadcast_equal(best, double(labels).expand_dims(axis)).max(axis=axis)


def equal(left: Any, right: Any) -> Any:
    """Compares elementwise, in float64."""
    return double(left) == (double(right) if is_array(right) else right)


def count_true(array: Any) -> Any:
    """Returns the number of true elements, in float64."""
    return arrays.sum_all(array)
