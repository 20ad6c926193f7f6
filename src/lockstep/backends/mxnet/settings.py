"""Sets the number of threads of MXNet's engine, and seeds its random number generators.

The engine has a thread for every CPU context, each with its own number of OpenMP threads, which OpenBLAS and oneDNN use
too. Results depend on this number. MXNet reads OMP_NUM_THREADS when it is imported and has no function to change the
number later. But the engine runs functions that are pushed to it, and a function that runs in a context's thread can
read and set the number.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, c_handle_array, check_call

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_NUM_SEEDS = 1 << 31


class _EngineContext(ctypes.Structure):
    """A context in the engine's own format."""

    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


def read_num_threads(context: Any) -> int:
    """Returns the number of OpenMP threads of the engine's thread for a context."""
    return int(_run_in_engine_thread(context, _LIB.omp_get_max_threads))


@contextmanager
def use_threads(count: int, contexts: Sequence[Any]) -> Iterator[None]:
    """Lets each CPU context compute with `count` threads inside this context; afterwards restores the old numbers.

    Waits for the engine only if a context has another number of threads.
    """
    others = [
        context for context in contexts if context.device_type == "cpu" and _read_initial_num_threads(context) != count
    ]
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
            _set_threads(context, _read_initial_num_threads(context))


def _set_threads(context: Any, count: int) -> None:
    _run_in_engine_thread(context, lambda: _LIB.omp_set_num_threads(ctypes.c_int(count)))


def seed(value: int, context: Any) -> None:
    """Queues the seeding of a context's random number generators in the engine; MXNet's seeds have 31 bits."""
    mx.random.seed(value % _NUM_SEEDS, ctx=context)


@lru_cache(maxsize=256)
def _read_initial_num_threads(context: Any) -> int:
    """Returns the number of OpenMP threads with which MXNet has started the context's thread."""
    return read_num_threads(context)


def _run_in_engine_thread(context: Any, function: Callable[[], Any]) -> Any:
    """Calls `function` in the engine's thread for a context, and returns its result."""
    done = mx.nd.zeros((1,), ctx=context)
    result: list[Any] = []
    callback = _Callback(lambda run, parameter: result.append(function()))
    engine_context = _EngineContext(context.device_typeid, context.device_id)
    check_call(
        _LIB.MXEnginePushSyncND(
            callback, None, None, ctypes.byref(engine_context), None, 0, c_handle_array([done]), 1, None, 0, b"lockstep"
        )
    )
    done.wait_to_read()  # the engine calls `callback` until then, so it must not be deleted
    return result[0]
