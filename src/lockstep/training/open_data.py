"""The data that a trainer was given, as a source of whole batches."""

from typing import Any

import numpy as np

from lockstep.backends.base import Backend, Recipe
from lockstep.core import batches
from lockstep.data import source
from lockstep.data.source import Source
from lockstep.devices import is_cpu
from lockstep.errors import BatchError

DEFAULT_BATCH_SIZE = 32


def open_source(
    recipe: Recipe, backend: Backend, seed: int, data: Any, batch_size: int | None, shuffle: bool, default: int
) -> Source:
    """Return the source of `data`, in batches of `batch_size`, or of `default` if that is None.

    Data that comes in batches keeps its own. Another `batch_size` beside it is refused: either of the two may be meant.
    """
    size = default if batch_size is None else batch_size
    found: Source | None = backend.source(data, size, shuffle, seed)
    if found is None:
        found = source.open_source(read_arrays(recipe, backend, data), size, shuffle, seed)
    if batch_size is not None and found.batch_size != batch_size:
        own = "batches already" if found.batch_size is None else f"batches of {found.batch_size} already"
        raise BatchError(
            f"Data that comes in batches has their size. Got batch_size={batch_size} beside a {type(data).__name__} "
            f"that gives {own}. Leave batch_size out to train on those, or make the {type(data).__name__} with "
            f"batches of {batch_size}."
        )
    return found


def read_arrays(recipe: Recipe, backend: Backend, data: Any) -> Any:
    """Return arrays in the form in which they are cut; anything else as it is."""
    if isinstance(data, dict | tuple):
        data = batches.several(data, recipe.habits.lists)
    if is_cpu(backend.devices[0]):  # numpy gathers examples without starting the framework's threads
        data = batches.transform(data, backend.host)
    return data


def join_data(x: Any, y: Any, sample_weight: Any, method: str) -> Any:
    """Return one piece of data out of inputs, targets and weights that were given apart.

    >>> join_data([1.0], [2], None, "fit"), join_data(([1.0], [2]), None, [0.5], "fit")
    (([1.0], [2]), ([1.0], [2], array([0.5])))
    """
    if y is not None and not (isinstance(x, dict | tuple | list) or batches.is_array(x)):
        raise BatchError(
            f"Targets are given beside arrays; a {type(x).__name__} gives its own. Got {method}({type(x).__name__}, "
            f"{type(y).__name__}). Use {method}(data)"
            + (", and fit(train, validation_data=val) to validate on the second." if method == "fit" else ".")
        )
    if y is not None:
        return (x, y) if sample_weight is None else (x, y, _as_weights(sample_weight))
    if sample_weight is None:
        return x
    if isinstance(x, tuple) and len(x) == 2:
        return (*x, _as_weights(sample_weight))
    raise BatchError(
        f"sample_weight goes beside inputs and targets. Got {method}({batches.describe(x)}, sample_weight=...). Use "
        f"{method}(x, y, sample_weight=w), or let the data give (inputs, targets, weights)."
    )


def _as_weights(given: Any) -> Any:
    """Return the weights as floats: integers that are given as weights are no index."""
    if isinstance(given, list):
        given = np.asarray(given)
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        return given.astype("float32")
    return given
