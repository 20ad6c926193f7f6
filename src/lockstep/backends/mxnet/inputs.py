"""Copies a shard's arrays to new memory on its context, and calls a block with a shard's inputs."""

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

_SUPPORTED = {"bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"}


def put(value: Any, context: Any, wide: bool) -> Any:
    """Copies every array of a pytree to new, contiguous memory on the context.

    Unless `wide`, numpy's float64 becomes float32, as in `mx.nd.array`.
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
    """Does what `mx.nd.array` does, in a third of the time. Without `npx.set_np()` a scalar becomes a vector."""
    shape = value.shape if mx.util.is_np_shape() else value.shape or (1,)
    source = np.ascontiguousarray(value, _choose_dtype(value.dtype, wide)).reshape(shape)
    handle = _new_alloc_handle(source.shape, context, False, source.dtype)
    check_call(_LIB.MXNDArraySyncCopyFromCPU(handle, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.size)))
    return mx.np.ndarray(handle) if mx.util.is_np_array() else NDArray(handle)


@lru_cache(maxsize=64)
def _choose_dtype(dtype: Any, wide: bool) -> Any:
    """Returns the dtype in which MXNet stores an array of this numpy dtype."""
    if dtype == np.float64 and not wide:
        return np.dtype("float32")
    if str(dtype) in _SUPPORTED:
        return dtype
    return np.dtype("float32" if dtype.kind == "f" else "int64")


def to_numpy(value: Any) -> Any:
    """Returns an MXNet array as numpy, also in a list; returns any other value as it is."""
    if isinstance(value, list):
        return [to_numpy(entry) for entry in value]
    return value.asnumpy() if is_array(value) else value


def to_cpu(value: Any) -> Any:
    """Copies a numpy array to an MXNet array on the CPU."""
    return put(value, mx.cpu(), wide=True)


def call(model: Any, inputs: Any) -> Any:
    """Calls the block with a tuple's entries in order, or with a dict's entries by the names that `forward` has."""
    if isinstance(inputs, Mapping):
        return model(*_order_inputs(type(model), inputs))
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _order_inputs(kind: type, inputs: Mapping[str, Any]) -> list[Any]:
    """Returns the inputs in the order of the forward function, because gluon blocks have no keyword arguments."""
    names = _list_input_names(kind)
    if not set(inputs) <= set(names):
        raise ModelError(
            f"The batch has the inputs {', '.join(inputs)}, but {kind.__name__}'s forward function takes "
            f"{', '.join(names)}. Rename the inputs, or give a tuple."
        )
    given = [name for name in names if name in inputs]
    if given != names[: len(given)]:
        raise ModelError(
            f"The batch has the inputs {', '.join(inputs)}, but {kind.__name__} takes {', '.join(names)}. A gluon "
            "block takes its inputs by position, so only inputs at the end can be left out. Give all inputs up to "
            f"{given[-1]}."
        )
    return [inputs[name] for name in given]


@lru_cache(maxsize=64)
def _list_input_names(kind: Any) -> list[str]:
    """Returns the names of the inputs that a block's class takes."""
    hybrid = issubclass(kind, HybridBlock) and kind.forward is HybridBlock.forward
    function = kind.hybrid_forward if hybrid else kind.forward
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in inspect.signature(function).parameters.items() if each.kind in positional]
    return names[2 if hybrid else 1 :]
