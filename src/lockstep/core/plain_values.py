"""Convert the state of foreign objects to the plain values that a checkpoint can hold, and back.

A checkpoint holds numbers, strings, lists, tuples, dicts and arrays; it never holds a pickle. A framework's scheduler
may also have a `Counter`, saved as a dict, or a function, which stays with the script. A data loader may have torch
tensors, saved as arrays with a mark.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from lockstep.errors import StateError

PLAIN_TYPES = (bool, int, float, str, type(None))
_TENSOR = "lockstep:tensor"


def refuse_value(value: Any, where: str) -> NoReturn:
    """Raise `StateError`: a checkpoint cannot hold this value."""
    raise StateError(
        f"A checkpoint cannot hold the {type(value).__name__} at {where}, only numbers, strings, lists, tuples, dicts "
        "and arrays. Use a number instead, or train without a checkpoint."
    )


def mark_tensor(value: Any, where: str) -> Any:
    """Convert a torch tensor to an array with a mark, which `restore_tensors` converts back; refuse anything else."""
    return {_TENSOR: value.detach().cpu().numpy().copy()} if hasattr(value, "detach") else refuse_value(value, where)


def to_plain(value: Any, where: str = "", convert: Callable[[Any, str], Any] = refuse_value) -> Any:
    """Copy a value in plain types, without the functions in its dicts. `where` names the value in an error.

    `convert` is called for a value that is not plain.

    >>> from collections import Counter
    >>> to_plain({"milestones": Counter([3, 5]), "rates": [np.float64(0.5)], "function": print})
    {'milestones': {3: 1, 5: 1}, 'rates': [0.5]}
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: to_plain(item, f"{where}[{key!r}]", convert) for key, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{where}[{index}]", convert) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return convert(value, where)


def restore_types(example: Any, value: Any) -> Any:
    """Give the mappings of a plain value the types that they have in `example`, the present state.

    >>> from collections import Counter
    >>> restore_types({"milestones": Counter()}, {"milestones": {3: 1, 5: 1}})
    {'milestones': Counter({3: 1, 5: 1})}
    """
    if isinstance(example, Mapping) and isinstance(value, Mapping):
        items = {key: restore_types(example.get(key), item) for key, item in value.items()}
        return items if type(example) is dict else type(example)(items)  # type: ignore[call-arg]
    if isinstance(example, list) and isinstance(value, list) and len(example) == len(value):
        return [restore_types(old, item) for old, item in zip(example, value, strict=True)]
    return value


def restore_tensors(value: Any) -> Any:
    """Convert the marked arrays in a plain value back to torch tensors."""
    if isinstance(value, Mapping):
        if _TENSOR in value:
            return sys.modules["torch"].from_numpy(np.array(value[_TENSOR]))
        return {key: restore_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restore_tensors(item) for item in value)
    return value
