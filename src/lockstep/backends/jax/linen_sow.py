"""Sown: what `self.sow` gathers in a linen module, which is no state.

It is told by what it does and not by its type, for a recurrent layer's carry is a
tuple too: what is sown is longer after every call.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import traverse_util
from flax.core import unfreeze

_flatten: Any = traverse_util.flatten_dict
_unflatten: Any = traverse_util.unflatten_dict

Path = tuple[str, ...]


def paths(variables: Mapping[str, Any], again: Callable[[], Any]) -> frozenset[Path]:
    """Where a module sows; `again` gives the form of what one more call makes of its variables.

    >>> sorted(paths({"state": {"carry": (0, 0), "seen": (0,)}}, lambda: {"state": {"carry": (1, 1), "seen": (0, 1)}}))
    [('state', 'seen')]
    """
    before = _flat(variables)
    if all(map(_is_array, before.values())):
        return frozenset()
    after = _flat(again())
    return frozenset(path for path in after if path in before and _form(before[path]) != _form(after[path]))


def without(variables: Mapping[str, Any], sown: Collection[Path]) -> dict[str, Any]:
    """The variables that are not sown."""
    return _nest({path: value for path, value in _flat(variables).items() if path not in sown})


def kept(before: Mapping[str, Any], after: Mapping[str, Any], sown: Collection[Path]) -> dict[str, Any]:
    """The variables after a call: without what is sown, and what has grown all the same as it was."""
    old = _flat(before)
    return _nest(
        {
            path: old[path] if path in old and _form(old[path]) != _form(value) else value
            for path, value in _flat(after).items()
            if path not in sown
        }
    )


def _flat(variables: Mapping[str, Any]) -> dict[Path, Any]:
    flat: dict[Path, Any] = _flatten(unfreeze(variables), keep_empty_nodes=True)  # type: ignore[arg-type]
    return flat


def _nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    nest: dict[str, Any] = _unflatten(flat)
    return nest


def _form(value: Any) -> Any:
    return jax.tree.structure(value)


def _is_array(value: Any) -> bool:
    return bool(jax.tree_util.treedef_is_leaf(_form(value)))
