"""Identity: what tells the examples that a cache keeps from others, as text that any process writes alike.

Arrays are told apart by all their bytes, files by name, size and time, the script's own
code by what Python made of it. What the code looks up as it runs (a data set's
attributes, files that it opens) is not seen; a cache compares a few examples, too.
"""

import dis
import functools
import hashlib
import os
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from lockstep.core import batches
from lockstep.data.bases import Arrays, Base, Indexed, address, root
from lockstep.data.segment import Segment

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


def of_base(base: Base) -> str:
    """What tells a base from others."""
    if isinstance(base, Arrays):
        return repr((batches.describe(base.opened), [_array(leaf) for leaf in batches.leaves(base.opened)]))
    assert isinstance(base, Indexed)
    kind = type(base.dataset)
    reads = [of_code(getattr(kind, name, None)) for name in ("__getitem__", "__getitems__")]
    return repr((kind.__qualname__, base.num_examples, reads))


def of_segment(segment: Segment) -> str:
    """What tells Python work from others."""
    return repr((segment.seed, [(each.random, each.batched, of_code(each.function)) for each in segment.maps]))


def of_code(value: Any, seen: tuple[Any, ...] = ()) -> Any:
    """What tells a function from others: its instructions, constants, names and plain surroundings."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | frozenset):
        parts = [of_code(each, seen) for each in value]
        return parts if isinstance(value, tuple) else sorted(map(repr, parts))  # a set's order is chance
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, of_code(value.co_consts, seen)
    if isinstance(value, functools.partial):
        return of_code((value.func, value.args, tuple(value.keywords.items())), seen)
    if isinstance(value, MethodType):
        return of_code(value.__func__, seen)
    if isinstance(value, np.ndarray):
        return _array(value)
    if not isinstance(value, FunctionType):
        call = getattr(type(value), "__call__", None)  # noqa: B004, its code is wanted
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return name, of_code(call, seen) if isinstance(call, FunctionType) else ""
    if value.__code__ in seen:
        return value.__qualname__
    seen = (*seen, value.__code__)
    given = value.__defaults__, tuple((value.__kwdefaults__ or {}).items())
    cells = [_content(cell) for cell in value.__closure__ or ()]
    return [of_code(each, seen) for each in (value.__code__, given, *cells, *_called(value))]


def _called(function: FunctionType) -> list[FunctionType]:
    """The functions of the same script that it names."""
    names = [each.argval for each in dis.get_instructions(function) if each.opname == "LOAD_GLOBAL"]
    found = [function.__globals__.get(name) for name in dict.fromkeys(names)]
    return [each for each in found if isinstance(each, FunctionType) and each.__module__ == function.__module__]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _array(leaf: Any) -> str:
    if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
        return hashlib.sha256(repr(leaf).encode()).hexdigest()
    file = root(leaf)
    if file is None:
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return repr((leaf.dtype.str, leaf.shape, hashlib.sha256(data.data).hexdigest()))
    name, status = str(file.filename), os.stat(str(file.filename))
    offset = file.offset + address(leaf) - address(file)
    return repr((leaf.dtype.str, leaf.shape, leaf.strides, offset, name, status.st_size, status.st_mtime_ns))
