"""Identity: a hash of the data and code below a cache, equal in every process that runs the same script.

A cache in a file may only be used again if nothing below it has changed. So the hash covers the arrays (by all their
bytes, mapped files by name, size and time), the data set, and every function given to `.map`, with what these reach.
What cannot be followed raises. What code takes from outside of Python (files that it opens, the clock) is not seen.
"""

import hashlib
import os
from typing import Any

import numpy as np

from lockstep.core import batches
from lockstep.data.code_hash import CodeHash
from lockstep.data.inputs import Arrays, Base, Indexed, address, root
from lockstep.data.map_stage import Segment
from lockstep.errors import BatchError


def of_base(base: Base) -> str:
    """Returns a text that differs for other data."""
    if isinstance(base, Arrays):
        return repr((batches.describe(base.opened), [_array(leaf) for leaf in batches.leaves(base.opened)]))
    assert isinstance(base, Indexed)
    return repr((base.num_examples, hash_code(base.dataset, "the data set")))


def of_segment(segment: Segment) -> str:
    """Returns a text that differs for other Python work."""
    maps = [
        (each.random, each.batched, hash_code(each.function, "the function given to .map")) for each in segment.maps
    ]
    return repr((segment.seed, maps))


def hash_code(value: Any, name: str = "this") -> str:
    """Returns a hash of a function or data set and of everything that it reaches.

    >>> hash_code(lambda x: x + 1) == hash_code(lambda x: x + 1)
    True
    >>> hash_code(lambda x: x + 1) == hash_code(lambda x: x + 2)
    False
    """
    try:
        return CodeHash(_array).hash(value, name)
    except RecursionError:
        raise BatchError(
            f"cache(path) can only be used again if nothing below it has changed, and {name} is nested too deeply to "
            'be compared. Use .cache(path, key="1") and another key after every change.'
        ) from None


def _array(leaf: Any) -> str:
    if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
        return hash_code(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, "the data")
    file = root(leaf)
    if file is None:
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return repr((leaf.dtype.str, leaf.shape, hashlib.sha256(data.data).hexdigest()))
    name, status = str(file.filename), os.stat(str(file.filename))
    offset = file.offset + address(leaf) - address(file)
    return repr((leaf.dtype.str, leaf.shape, leaf.strides, offset, name, status.st_size, status.st_mtime_ns))
