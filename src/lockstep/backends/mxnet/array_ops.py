"""MXNet's arrays on its contexts, `mx.nd` and `mx.np` alike.

Shapes are numpy's while they are copied: without `npx.set_np()` MXNet takes a length of 0 for one not known yet.
"""

from collections.abc import Sequence
from typing import Any

from mxnet import MXNetError, autograd, nd
from mxnet.util import np_shape

from lockstep.backends.mxnet.arrays import classic, dtype_of, is_array
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
