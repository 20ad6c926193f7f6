"""Inputs: a shard's arrays in fresh memory on its context, and how a block is called with them."""

import ctypes
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray, _new_alloc_handle

from lockstep.backends.mxnet.arrays import is_array
from lockstep.core.batches import transform
from lockstep.errors import ModelError

_HELD = {"bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"}  # what MXNet has a type for


def put(value: Any, context: Any, wide: bool) -> Any:
    """A nest with every array in fresh, contiguous memory on the context.

    Unless the model is `wide`, numpy's float64 becomes float32, as `mx.nd.array` has it.
    """

    def leaf(value: Any) -> Any:
        if is_array(value):
            return value.copyto(context)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return _from_numpy(value, context, wide)
        if isinstance(value, list):
            return [put(entry, context, wide) for entry in value]
        return value

    return transform(value, leaf)


def _from_numpy(value: Any, context: Any, wide: bool) -> Any:
    """What `mx.nd.array` does, in a third of its time; a number is a vector of one where arrays have axes."""
    shape = value.shape if mx.util.is_np_shape() else value.shape or (1,)
    source = np.ascontiguousarray(value, _held(value.dtype, wide)).reshape(shape)
    handle = _new_alloc_handle(source.shape, context, False, source.dtype)
    check_call(_LIB.MXNDArraySyncCopyFromCPU(handle, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.size)))
    return mx.np.ndarray(handle) if mx.util.is_np_array() else NDArray(handle)


@lru_cache(maxsize=64)
def _held(dtype: Any, wide: bool) -> Any:
    """The type that MXNet has for numpy's."""
    if dtype == np.float64 and not wide:
        return np.dtype("float32")
    if str(dtype) in _HELD:
        return dtype
    return np.dtype("float32" if dtype.kind == "f" else "int64")


def host(value: Any) -> Any:
    """An array of MXNet's as numpy; anything else as it is."""
    if isinstance(value, list):
        return [host(entry) for entry in value]
    return value.asnumpy() if is_array(value) else value


def on_cpu(value: Any) -> Any:
    """An array of the script's kind on the CPU."""
    return put(value, mx.cpu(), wide=True)


def call(model: Any, inputs: Any) -> Any:
    """The block's outputs: a tuple is spread, a dict goes by the names of its forward function."""
    if isinstance(inputs, Mapping):
        return model(*_ordered(type(model), inputs))
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _ordered(kind: type, inputs: Mapping[str, Any]) -> list[Any]:
    """The inputs in the order of the forward function; a gluon block takes none by name."""
    names = _names(kind)
    if not set(inputs) <= set(names):
        raise ModelError(
            f"Inputs by name carry the names of the block's forward function. Got {', '.join(inputs)}; "
            f"{kind.__name__} takes {', '.join(names)}. Rename them, or give a tuple."
        )
    given = [name for name in names if name in inputs]
    if given != names[: len(given)]:
        raise ModelError(
            f"A gluon block takes its inputs in order. Got {', '.join(inputs)}; {kind.__name__} takes "
            f"{', '.join(names)}. Give all up to the last."
        )
    return [inputs[name] for name in given]


@lru_cache(maxsize=64)
def _names(kind: Any) -> list[str]:
    """The names of the inputs of a block's class."""
    hybrid = issubclass(kind, HybridBlock) and kind.forward is HybridBlock.forward
    function = kind.hybrid_forward if hybrid else kind.forward
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in inspect.signature(function).parameters.items() if each.kind in positional]
    return names[2 if hybrid else 1 :]
