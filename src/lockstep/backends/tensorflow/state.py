"""State: variables as named arrays, and back."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.backends.base import Array, State
from lockstep.errors import StateError


def read(variables: Mapping[str, Any]) -> State:
    """A copy of every variable."""
    return {name: array_of(variable) for name, variable in variables.items()}


def write(variables: Mapping[str, Any], state: Mapping[str, Array]) -> None:
    """Takes over a whole state; nothing is written where it does not fit."""
    _check(variables, state)
    for name, variable in variables.items():
        variable.assign(state[name].data)


def checksums(variables: Mapping[str, Any]) -> list[int]:
    """A number for every variable that tells its bytes from others."""
    return [zlib.crc32(array.data.tobytes()) for array in read(variables).values()]


def array_of(variable: Any) -> Array:
    """A copy of one variable."""
    data = np.array(variable.numpy())
    return Array(data, data.dtype.name)


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
