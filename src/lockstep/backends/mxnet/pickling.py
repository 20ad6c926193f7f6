"""Pickling: block and optimizer in one piece, without the graphs that gluon has built for them."""

import io
from dataclasses import replace
from typing import Any

import cloudpickle
from mxnet import gluon

from lockstep.backends.base import Recipe
from lockstep.errors import ModelError

# What a hybridized block builds for itself, as it is before that.
GRAPHS = {"_cached_graph": (), "_cached_op": None, "_cached_op_args": ()}


def dump(recipe: Recipe, updater: Any) -> bytes:
    """One pickle of the recipe, with the optimizer's slots: an updater is an optimizer that has its own."""
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(replace(recipe, optimizer=updater))
    except Exception as error:
        raise ModelError(
            f"A fresh process gets the block by pickle. It cannot be pickled: {error}. "
            "Make the attribute in the forward pass, or leave it out with __getstate__."
        ) from error
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with blocks whose graphs are built anew."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, gluon.HybridBlock):
            own = {"_cached_graph": obj._cached_graph} if isinstance(obj, gluon.SymbolBlock) else {}  # it is one
            return _empty, (type(obj),), {**vars(obj), **GRAPHS, **own}, None, None, _fill
        return super().reducer_override(obj)


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _fill(block: Any, attributes: dict[str, Any]) -> None:
    vars(block).update(attributes)
