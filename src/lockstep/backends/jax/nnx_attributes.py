"""Reads and writes the attributes of the modules in an nnx graph that are not arrays.

Scalars and strings are constants in an executable; the script may change them between two steps, and the model is then
compiled again. Every other attribute, such as a function or a submodule, must stay the same object.
"""

import json
import operator
from typing import Any

import jax
import numpy as np
from flax import nnx

from lockstep.backends.jax import train_mode
from lockstep.errors import ModelError, StateError

_ARRAYS = (jax.Array, np.ndarray)
_PLAIN = (bool, int, float, str, type(None))


class NnxAttributes:
    """The attributes of every module in a graph, as they were at the last call of `read`."""

    def __init__(self, module: nnx.Module) -> None:
        self._nodes = {str(path): node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)}
        # References, not ids: while the old object is referenced, no new object can get its address.
        self._last = self._collect()
        self._text = _to_json(self._last)

    def read(self) -> str:
        """Returns the current scalars and strings as JSON; raises if another attribute was replaced."""
        last, current = self._last, self._collect()
        if list(last) == list(current) and all(map(operator.is_, last.values(), current.values())):
            return self._text
        for place in {**last, **current}:
            old, new = (each.get(place) for each in (last, current))
            if old is not new and not (type(old) in _PLAIN and type(new) in _PLAIN):
                raise ModelError(
                    f"The model's attribute {place[1]!r} was replaced, added or removed after lockstep.wrap. "
                    "Call lockstep.wrap again after changing the model. To change a variable's array, use "
                    "variable[...] = array."
                )
        self._last, self._text = current, _to_json(current)
        return self._text

    def write(self, text: str) -> None:
        """Writes the scalars and strings of another process's modules or of a checkpoint."""
        given, present = json.loads(text), json.loads(self.read())
        if unknown := sorted(given.keys() - self._nodes.keys()):
            raise StateError(
                f"The checkpoint does not fit this model: it has the state {given[unknown[0]]!r} of a "
                f"module {unknown[0]!r}, "
                "which the model does not have. Use the model that the checkpoint was saved with."
            )
        for path in given.keys() | present.keys():
            node, new, old = self._nodes[path], given.get(path, {}), present.get(path, {})
            for name in old.keys() - new.keys():
                delattr(node, name)
            for name, value in new.items():
                # As JSON texts, because 1, 1.0 and True are equal in Python, but different constants in an executable.
                if name not in old or json.dumps(value) != json.dumps(old[name]):
                    setattr(node, name, value)

    def _collect(self) -> dict[tuple[str, str], Any]:
        """Returns every attribute by its module's path and its name.

        An array is represented by `_ARRAYS`, which is the same object for every array, so a replaced array is no change
        here: `NnxModel` reads arrays. Mode flags, which `ModuleModes` reads, and intermediate values are left out.
        """
        result = {}
        for path, node in self._nodes.items():
            for name, value in vars(node).items():
                if type(value) in _PLAIN:
                    if not train_mode.is_mode_flag(name, value):
                        result[path, name] = value
                elif isinstance(value, nnx.Variable):
                    if not isinstance(value, nnx.Intermediate):
                        result[path, name] = value
                elif not name.startswith("_pytree"):
                    result[path, name] = _ARRAYS if isinstance(value, _ARRAYS) else value
        return result


def _to_json(attributes: dict[tuple[str, str], Any]) -> str:
    """Returns the scalars and strings as JSON, equal only if all values, types and signs of zeros are equal."""
    result: dict[str, dict[str, Any]] = {}
    for (path, name), value in attributes.items():
        if type(value) in _PLAIN:
            result.setdefault(path, {})[name] = value
    return json.dumps(result, sort_keys=True)
