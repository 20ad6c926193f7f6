"""Finds and drops what `self.sow` stores in a linen module: intermediate values, which are not part of the state.

`self.sow` appends to a tuple, which therefore grows in every call. That it is a tuple does not identify it, because a
recurrent layer's carry is a tuple, too.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import traverse_util
from flax.core import unfreeze

Path = tuple[str, ...]
_unflatten: Any = traverse_util.unflatten_dict


def find_paths(variables: Mapping[str, Any], call: Callable[[], Any]) -> frozenset[Path]:
    """Returns the paths of the variables that grow in a call of the model; `call` returns the variables after a call.

    >>> before = {"state": {"carry": (0, 0), "seen": (0,)}}
    >>> sorted(find_paths(before, lambda: {"state": {"carry": (1, 1), "seen": (0, 1)}}))
    [('state', 'seen')]
    """
    before = _flatten(variables)
    if all(map(_is_array, before.values())):  # there is no tuple, so `call`, which traces the model, is not needed
        return frozenset()
    after = _flatten(call())
    return frozenset(path for path in after if path in before and not _has_same_structure(before[path], after[path]))


def drop_paths(variables: Mapping[str, Any], paths: Collection[Path]) -> dict[str, Any]:
    """Returns a copy of the variables that leaves out the paths."""
    result: dict[str, Any] = _unflatten(
        {path: value for path, value in _flatten(variables).items() if path not in paths}
    )
    return result


def update_variables(before: Mapping[str, Any], after: Mapping[str, Any], paths: Collection[Path]) -> dict[str, Any]:
    """Returns the variables after a call, without `paths`; a variable whose structure changed keeps its old value."""
    old = _flatten(before)
    new = {
        path: old[path] if path in old and not _has_same_structure(old[path], value) else value
        for path, value in _flatten(after).items()
        if path not in paths
    }
    result: dict[str, Any] = _unflatten(new)
    return result


def _flatten(variables: Mapping[str, Any]) -> dict[Path, Any]:
    """Returns the variables by path; a tuple of intermediate values is one variable."""
    flat: dict[Path, Any] = traverse_util.flatten_dict(unfreeze(variables), keep_empty_nodes=True)  # type: ignore
    return flat


def _has_same_structure(left: Any, right: Any) -> bool:
    structure: Any = jax.tree.structure
    return bool(structure(left) == structure(right))


def _is_array(value: Any) -> bool:
    return bool(jax.tree_util.treedef_is_leaf(jax.tree.structure(value)))
