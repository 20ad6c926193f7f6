"""Settings: the threads of MXNet's engine, and its generators.

The engine has a thread of its own for every CPU context, and each has its own count
of OpenMP threads, for OpenBLAS and oneDNN as well. It is part of the bits. MXNet
reads OMP_NUM_THREADS when it is imported and offers nothing afterwards; but the
engine runs what it is given, so a function pushed to a context's thread asks for the
count there, and sets it.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, c_handle_array, check_call

_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_SEEDS = 1 << 31


class _Place(ctypes.Structure):
    """A context as the engine has it."""

    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


def num_threads(context: Any) -> int:
    """The OpenMP threads of the engine's thread for this context."""
    return int(_inside(context, _LIB.omp_get_max_threads))


@contextmanager
def threads(count: int, contexts: Sequence[Any]) -> Iterator[None]:
    """Inside, each context computes with `count` threads; afterwards with as many as before.

    Where that is the count it has anyway, nothing is done and nothing waited for.
    """
    others = [context for context in contexts if context.device_type == "cpu" and _own(context) != count]
    if not others:
        yield
        return
    mx.nd.waitall()
    try:
        for context in others:
            _set_threads(context, count)
        yield
    finally:
        mx.nd.waitall()
        for context in others:
            _set_threads(context, _own(context))


def _set_threads(context: Any, count: int) -> None:
    _inside(context, lambda: _LIB.omp_set_num_threads(ctypes.c_int(count)))


def seed(value: int, context: Any) -> None:
    """Seeds the context's generators, when the engine has come so far; MXNet's seeds have 31 bits."""
    mx.random.seed(value % _SEEDS, ctx=context)


@lru_cache(maxsize=256)
def _own(context: Any) -> int:
    """The count with which MXNet started the context's thread, asked for once."""
    return num_threads(context)


def _inside(context: Any, function: Callable[[], Any]) -> Any:
    """What `function` gives in the engine's thread for this context."""
    done = mx.nd.zeros((1,), ctx=context)
    result: list[Any] = []
    called = _CALLED(lambda run, parameter: result.append(function()))
    place = _Place(context.device_typeid, context.device_id)
    check_call(
        _LIB.MXEnginePushSyncND(
            called, None, None, ctypes.byref(place), None, 0, c_handle_array([done]), 1, None, 0, b"lockstep"
        )
    )
    done.wait_to_read()  # `called` must live until then
    return result[0]
