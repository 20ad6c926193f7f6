"""Reads variables into the named arrays of a state, and writes a state into variables."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.core.state import ArraySpec, check_state
from lockstep.core.types import Array


def write_variables(variables: Mapping[str, Any], state: Mapping[str, Array]) -> None:
    """Writes a state into the variables; raises StateError, and changes nothing, if it does not fit."""
    check_state(state, {name: _read_spec(variable) for name, variable in variables.items()})
    for name, variable in variables.items():
        variable.assign(state[name].data)


def sum_bytes(variables: Mapping[str, Any]) -> list[int]:
    """Returns one checksum for each variable, in order, to detect what the script has written."""
    return [zlib.crc32(to_array(variable).data.tobytes()) for variable in variables.values()]


def to_array(variable: Any) -> Array:
    """Returns a copy of one variable on the host."""
    data = np.array(variable.numpy())
    return Array(data, data.dtype.name)


def _read_spec(variable: Any) -> ArraySpec:
    """Returns the shape and dtype of a variable of Keras or of TensorFlow, as `to_array` would give them."""
    return ArraySpec(tuple(variable.shape), tf.as_dtype(variable.dtype).name)
