"""The arrays of a checkpoint as plain numpy, for whoever has no framework at hand."""

import os
from typing import Any

from numpy.typing import NDArray

from lockstep.checkpoint.store import find
from lockstep.core.low_precision import widen
from lockstep.errors import StateError


def load_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays of a checkpoint, or of the newest whole one in a folder of checkpoints, by name.

    The model's have the framework's own names, the others begin with `optimizer.` and the
    like. Every byte is verified. bfloat16, which numpy does not have, comes as float32.

    >>> import tempfile, numpy as np
    >>> from lockstep.backends.base import Array
    >>> from lockstep.checkpoint import Snapshot, write
    >>> state = {"model.w": Array(np.zeros(2), "float64"), "optimizer.w.step": Array(np.asarray(3), "python")}
    >>> with tempfile.TemporaryDirectory() as home:
    ...     load_arrays(write(home + "/mine", Snapshot(state)))
    {'w': array([0., 0.]), 'optimizer.w.step': array(3)}
    """
    result = {}
    for name, (data, dtype) in find(path).state.items():
        bare = name.removeprefix("model.")
        if bare in result:
            raise StateError(f"Arrays have names of their own. Got two by the name {bare!r} in {path}. Load the files.")
        result[bare] = widen(data, dtype) if dtype == "bfloat16" else data
    return result
