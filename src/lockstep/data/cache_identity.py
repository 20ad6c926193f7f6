"""The identity of a cache: a hash of the data and code that its examples are computed from.

A cache file may only be used again if the steps before `.cache` have not changed. So the hash covers the arrays (all
bytes of arrays in memory; name, size and time of mapped files), the data set, and every function given to `.map`, with
everything that these use. It is equal in every process that runs the same script. An object that cannot be hashed
raises. What the code reads from outside of Python (files, the clock) is not covered.
"""

import hashlib
import os
from typing import Any

import numpy as np

from lockstep.core import batches
from lockstep.data.code_hash import CodeHash
from lockstep.data.map_stage import MapStage
from lockstep.data.pipeline_inputs import Arrays, Indexed, Input, find_mapped_file, get_address
from lockstep.errors import BatchError


def hash_input(input: Input) -> str:
    """Returns a text that identifies the data of a pipeline's input."""
    if isinstance(input, Arrays):
        return repr((batches.describe(input.arrays), [_hash_array(leaf) for leaf in batches.leaves(input.arrays)]))
    assert isinstance(input, Indexed)
    return repr((input.num_examples, hash_code(input.dataset, "the data set")))


def hash_stage(stage: MapStage) -> str:
    """Returns a text that identifies the functions of a map stage."""
    maps = [(each.random, each.batched, hash_code(each.function, "the function given to .map")) for each in stage.maps]
    return repr((stage.seed, maps))


def hash_code(value: Any, name: str = "this") -> str:
    """Returns a hash of a function or data set and everything that it uses; `name` describes it in an error.

    >>> hash_code(lambda x: x + 1) == hash_code(lambda x: x + 1)
    True
    >>> hash_code(lambda x: x + 1) == hash_code(lambda x: x + 2)
    False
    """
    try:
        return CodeHash(_hash_array).hash(value, name)
    except RecursionError:
        raise BatchError(
            f".cache(path) cannot tell whether {name} has changed since the file was written, because {name} is nested "
            'too deeply to be compared. Use .cache(path, key="1") and change the key after every change of data or '
            "code, or .cache() to store the examples in memory only."
        ) from None


def _hash_array(leaf: Any) -> str:
    if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
        return hash_code(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, "the data")
    file = find_mapped_file(leaf)
    if file is None:
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return repr((leaf.dtype.str, leaf.shape, hashlib.sha256(data.data).hexdigest()))
    name, status = str(file.filename), os.stat(str(file.filename))
    offset = file.offset + get_address(leaf) - get_address(file)
    return repr((leaf.dtype.str, leaf.shape, leaf.strides, offset, name, status.st_size, status.st_mtime_ns))
