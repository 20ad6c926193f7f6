"""Plain: a foreign object's state as a checkpoint may hold it, and back.

A checkpoint holds numbers, text, lists, tuples, dicts and arrays; no pickle is ever
read. A framework's scheduler may keep a `Counter` or a function among its numbers:
the first travels as a dict, the second is the script's and stays with it. A loader may
keep torch's tensors, which travel as arrays with a mark.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from lockstep.errors import StateError

PLAIN = (bool, int, float, str, type(None))
_TENSOR = "lockstep:tensor"


def refuse(value: Any, where: str) -> NoReturn:
    """Raises: this is nothing that a checkpoint may hold."""
    raise StateError(
        f"A saved state holds numbers, text, lists, tuples, dicts and arrays. Got a {type(value).__name__} at {where}. "
        "Make it a number, or train without a checkpoint."
    )


def marked(value: Any, where: str) -> Any:
    """One of torch's tensors as an array with a mark, which `native` knows."""
    return {_TENSOR: value.detach().cpu().numpy().copy()} if hasattr(value, "detach") else refuse(value, where)


def plain(value: Any, where: str = "", other: Callable[[Any, str], Any] = refuse) -> Any:
    """A copy in plain types; functions in a dict are left out. `where` names the value in an error.

    `other` says what becomes of a value that is not plain.

    >>> from collections import Counter
    >>> plain({"milestones": Counter([3, 5]), "rates": [np.float64(0.5)], "function": print})
    {'milestones': {3: 1, 5: 1}, 'rates': [0.5]}
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: plain(item, f"{where}[{key!r}]", other) for key, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        items = [plain(item, f"{where}[{index}]", other) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return other(value, where)


def like(model: Any, value: Any) -> Any:
    """A plain value with the types that `model`, an example of it, has.

    >>> from collections import Counter
    >>> like({"milestones": Counter()}, {"milestones": {3: 1, 5: 1}})
    {'milestones': Counter({3: 1, 5: 1})}
    """
    if isinstance(model, Mapping) and isinstance(value, Mapping):
        items = {key: like(model.get(key), item) for key, item in value.items()}
        return items if type(model) is dict else type(model)(items)  # type: ignore[call-arg]
    if isinstance(model, list) and isinstance(value, list) and len(model) == len(value):
        return [like(example, item) for example, item in zip(model, value, strict=True)]
    return value


def native(value: Any) -> Any:
    """A plain value, the arrays that were marked as tensors again."""
    if isinstance(value, Mapping):
        if _TENSOR in value:
            return sys.modules["torch"].from_numpy(np.array(value[_TENSOR]))
        return {key: native(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(native(item) for item in value)
    return value
