"""MXNet's arrays on its contexts, `mx.nd` and `mx.np` alike.

Shapes are numpy's while they are copied: without `npx.set_np()` MXNet takes a length of 0 for one not known yet.
"""

from typing import Any

from mxnet import autograd
from mxnet.util import np_shape

from lockstep.backends.mxnet.replicas import context_of


def copy(array: Any, device: str) -> Any:
    """A copy with room for its gradient."""
    with autograd.pause(), np_shape(True):
        fresh = array.copyto(context_of(device))
        fresh.attach_grad()
    return fresh


def cut(array: Any, start: int, stop: int, device: str) -> Any:
    """A copy of some examples."""
    with np_shape(True):
        return array[start:stop].copyto(context_of(device))


def check(array: Any) -> str:
    """The engine knows the value of every array."""
    return ""


def add(left: Any, right: Any) -> Any:
    """The addition of the left array's context."""
    with autograd.pause(), np_shape(True):
        return left + (right if right.ctx == left.ctx else right.copyto(left.ctx))


def write(value: Any, target: Any) -> Any:
    """In place."""
    with autograd.pause(), np_shape(True):
        return value.copyto(target)
