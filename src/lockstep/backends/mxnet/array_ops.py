"""MXNet's arrays on its contexts, `mx.nd` and `mx.np` alike.

Shapes are numpy's while they are copied: without `npx.set_np()` MXNet takes a length of 0 for one not known yet.
"""

from typing import Any

from mxnet import MXNetError, autograd
from mxnet.util import np_shape

from lockstep.backends.mxnet.arrays import is_array
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


def write(value: Any, target: Any) -> Any:
    """In place."""
    with autograd.pause(), np_shape(True):
        return target if value is target else value.copyto(target)
