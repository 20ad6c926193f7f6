"""State: variables as named arrays, and back."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends.base import Array, State
from lockstep.errors import StateError


def read(variables: Mapping[str, Any]) -> State:
    """A copy of every variable."""
    return {name: array_of(variable) for name, variable in variables.items()}


def write(variables: Mapping[str, Any], state: Mapping[str, Array]) -> None:
    """Takes over a whole state; nothing is written where it does not fit."""
    _check(variables, state)
    for name, variable in variables.items():
        saved = state[name]
        variable.assign(_numpy(saved))


def checksums(variables: Mapping[str, Any]) -> list[int]:
    """A number for every variable that tells its bytes from others."""
    return [zlib.crc32(array.data.tobytes()) for array in read(variables).values()]


def array_of(variable: Any) -> Array:
    """A copy of one variable; the bytes of bfloat16 as int16."""
    data = np.array(variable.numpy())
    if data.dtype.name == "bfloat16":
        return Array(data.view(np.int16), "bfloat16")
    return Array(data, data.dtype.name)


def _numpy(array: Array) -> Any:
    if array.dtype == "bfloat16":
        return array.data.view(tf.bfloat16.as_numpy_dtype)
    return array.data


def _check(variables: Mapping[str, Any], state: Mapping[str, Array]) -> None:
    for name, variable in variables.items():
        room, _, short = name.partition(".")
        if name not in state:
            raise StateError(
                f"The state does not fit this {room}. It has nothing for {short!r}. Load the state of this {room}."
            )
        if state[name].data.shape != tuple(variable.shape):
            raise StateError(
                f"The state does not fit this {room}. At {short!r} it has {state[name].data.shape}, "
                f"the {room} {tuple(variable.shape)}. Load the state of this {room}."
            )
    for name in state:
        if name not in variables:
            room, _, short = name.partition(".")
            raise StateError(f"The state does not fit this {room}, which has no {short!r}. Load its own state.")
