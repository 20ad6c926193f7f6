"""Converts the state of a scheduler or loader to plain values that a checkpoint can store, and back.

A checkpoint stores numbers, strings, lists, tuples, dicts and arrays; no pickle is ever read. A scheduler's state may
contain a `Counter`, which is stored as a dict, or a function, which is left out because the script defines it. A
loader's state may contain a framework's arrays, which are stored as numpy arrays with a mark.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from lockstep.core import framework_hooks
from lockstep.errors import StateError

PLAIN = (bool, int, float, str, type(None))


def refuse(value: Any, where: str) -> NoReturn:
    """Raises StateError, which says that a checkpoint cannot store this value."""
    raise StateError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot store. Use a number, a string, a numpy array, "
        "or a list, tuple or dict of these; or train without a checkpoint."
    )


def mark_array(value: Any, where: str) -> Any:
    """Returns a framework's array as a numpy array with a mark, for `restore_arrays`; raises for any other value."""
    for hooks in framework_hooks.list_imported():
        if isinstance(value, hooks.ARRAY_TYPES):
            return {hooks.ARRAY_MARK: hooks.to_numpy(value)}
    return refuse(value, where)


def to_plain(value: Any, where: str = "", convert_other: Callable[[Any, str], Any] = refuse) -> Any:
    """Returns a copy of a value in plain types, which a checkpoint can store; functions in a dict are left out.

    `where` describes the value in an error. `convert_other` converts a value that is not plain, or raises.

    >>> from collections import Counter
    >>> to_plain({"milestones": Counter([3, 5]), "rates": [np.float64(0.5)], "function": print})
    {'milestones': {3: 1, 5: 1}, 'rates': [0.5]}
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {
            key: to_plain(item, f"{where}[{key!r}]", convert_other) for key, item in value.items() if not callable(item)
        }
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{where}[{index}]", convert_other) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return convert_other(value, where)


def restore_types(example: Any, value: Any) -> Any:
    """Returns a plain value converted to the container types of `example`, such as `Counter`.

    >>> from collections import Counter
    >>> restore_types({"milestones": Counter()}, {"milestones": {3: 1, 5: 1}})
    {'milestones': Counter({3: 1, 5: 1})}
    """
    if isinstance(example, Mapping) and isinstance(value, Mapping):
        items = {key: restore_types(example.get(key), item) for key, item in value.items()}
        return items if type(example) is dict else type(example)(items)  # type: ignore[call-arg]
    if isinstance(example, list) and isinstance(value, list) and len(example) == len(value):
        return [restore_types(*pair) for pair in zip(example, value, strict=True)]
    return value


def restore_arrays(value: Any) -> Any:
    """Returns a plain value in which each numpy array with a mark is converted back to the framework's array."""
    if isinstance(value, Mapping):
        for hooks in framework_hooks.list_imported():
            if hooks.ARRAY_MARK in value:
                return hooks.from_numpy(value[hooks.ARRAY_MARK])
        return {key: restore_arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restore_arrays(item) for item in value)
    return value
