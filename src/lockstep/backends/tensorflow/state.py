"""Variables as the named arrays of a state, and back."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.backends.base import Array, State
from lockstep.core.state import ArraySpec, check_state


def read_variables(variables: Mapping[str, Any]) -> State:
    """Copy every variable."""
    return {name: to_array(variable) for name, variable in variables.items()}


def write_variables(variables: Mapping[str, Any], state: Mapping[str, Array]) -> None:
    """Write a whole state into the variables; one that does not fit changes nothing."""
    check_state(state, {name: _read_spec(variable) for name, variable in variables.items()})
    for name, variable in variables.items():
        variable.assign(state[name].data)


def sum_bytes(variables: Mapping[str, Any]) -> list[int]:
    """Compute a checksum of every variable."""
    return [zlib.crc32(array.data.tobytes()) for array in read_variables(variables).values()]


def to_array(variable: Any) -> Array:
    """Copy one variable to the host."""
    data = np.array(variable.numpy())
    return Array(data, data.dtype.name)


def _read_spec(variable: Any) -> ArraySpec:
    """The shape and dtype that `to_array` gives this variable, which may be Keras's or TensorFlow's own."""
    return ArraySpec(tuple(variable.shape), tf.as_dtype(variable.dtype).name)
