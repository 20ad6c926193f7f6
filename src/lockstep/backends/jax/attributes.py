"""Attributes: what hangs on the modules of an nnx graph beside their arrays.

Numbers and words are constants to an executable and may change between two steps.
Everything else, a function or a submodule, is to stay the object that it was: it is
kept, so that no other can come to lie at its address.
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


class Attributes:
    """The attributes of every module in a graph, as they were seen last."""

    def __init__(self, module: nnx.Module) -> None:
        self._nodes = {str(path): node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)}
        self._seen = self._found()
        self._text = _text(self._seen)

    def look(self) -> str:
        """The numbers and words as they are now, as text; raises where anything else is another object."""
        seen, found = self._seen, self._found()
        if list(seen) == list(found) and all(map(operator.is_, seen.values(), found.values())):
            return self._text
        for place in {**seen, **found}:
            old, new = (each.get(place) for each in (seen, found))
            if old is not new and not (type(old) in _PLAIN and type(new) in _PLAIN):
                raise ModelError(
                    f"A model keeps the modules and variables it was wrapped with. {place[1]!r} was replaced, added or "
                    "taken away since. Call lockstep.wrap again after changing the model; writing variable[...] = "
                    "array works."
                )
        self._seen, self._text = found, _text(found)
        return self._text

    def write(self, text: str) -> None:
        """Makes the numbers and words those of a text, which another process's modules or a checkpoint gave."""
        told, own = json.loads(text), json.loads(self.look())
        if strangers := sorted(told.keys() - self._nodes.keys()):
            raise StateError(
                f"The checkpoint does not fit this model. It has {told[strangers[0]]!r} for a module {strangers[0]!r}, "
                "the model no such module. Use the model it was saved with."
            )
        for path in told.keys() | own.keys():
            node, theirs, ours = self._nodes[path], told.get(path, {}), own.get(path, {})
            for name in ours.keys() - theirs.keys():
                delattr(node, name)
            for name, value in theirs.items():
                if name not in ours or json.dumps(value) != json.dumps(ours[name]):
                    setattr(node, name, value)

    def _found(self) -> dict[tuple[str, str], Any]:
        """Every attribute by its module's path and its name; of an array, that it is one.

        Not what tells the mode, which `modes.ModuleModes` reads, nor what an eager call has sown.
        """
        result = {}
        for path, node in self._nodes.items():
            for name, value in vars(node).items():
                if type(value) in _PLAIN:
                    if not train_mode.tells(name, value):
                        result[path, name] = value
                elif isinstance(value, nnx.Variable):
                    if not isinstance(value, nnx.Intermediate):
                        result[path, name] = value
                elif not name.startswith("_pytree"):
                    result[path, name] = _ARRAYS if isinstance(value, _ARRAYS) else value
        return result


def _text(found: dict[tuple[str, str], Any]) -> str:
    """Their numbers and words; equal texts are equal values of equal types, signs of zeros included."""
    result: dict[str, dict[str, Any]] = {}
    for (path, name), value in found.items():
        if type(value) in _PLAIN:
            result.setdefault(path, {})[name] = value
    return json.dumps(result, sort_keys=True)
