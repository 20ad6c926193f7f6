"""Opens the data given to a trainer as a source of whole batches."""

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
    """Returns a source of the batches of `data`; they have `batch_size` examples, or `default` if that is None.

    Data that consists of batches already keeps their size; a different `batch_size` then raises BatchError.
    """
    size = default if batch_size is None else batch_size
    found: Source | None = backend.source(data, size, shuffle, seed)
    if found is None:
        found = source.open_source(read_arrays(recipe, backend, data), size, shuffle, seed)
    if batch_size is not None and found.batch_size != batch_size:
        own = "batches already" if found.batch_size is None else f"batches of {found.batch_size} already"
        raise BatchError(
            f"batch_size={batch_size} cannot be used with this {type(data).__name__}, because it yields {own}. Leave "
            f"batch_size out to use these batches, or create the {type(data).__name__} with batches of {batch_size}."
        )
    return found


def read_arrays(recipe: Recipe, backend: Backend, data: Any) -> Any:
    """Returns arrays in a form that can be split into batches; returns any other data unchanged."""
    if isinstance(data, dict | tuple):
        data = batches.several(data, recipe.habits.lists)
    if is_cpu(backend.devices[0]):  # numpy gathers examples without starting the framework's threads
        data = batches.transform(data, backend.host)
    return data


def join_data(x: Any, y: Any, sample_weight: Any, method: str) -> Any:
    """Returns inputs, targets and weights that were given as separate arguments as one tuple.

    >>> join_data([1.0], [2], None, "fit"), join_data(([1.0], [2]), None, [0.5], "fit")
    (([1.0], [2]), ([1.0], [2], array([0.5])))
    """
    if y is not None and not (isinstance(x, dict | tuple | list) or batches.is_array(x)):
        raise BatchError(
            f"{method}({type(x).__name__}, {type(y).__name__}) is not supported, because separate targets can only be "
            f"given with arrays. Use {method}(data)"
            + (", or fit(train, validation_data=val) if the second is validation data." if method == "fit" else ".")
        )
    if y is not None:
        return (x, y) if sample_weight is None else (x, y, _as_weights(sample_weight))
    if sample_weight is None:
        return x
    if isinstance(x, tuple) and len(x) == 2:
        return (*x, _as_weights(sample_weight))
    raise BatchError(
        f"sample_weight can only be used with inputs and targets as arrays. Got {method}({batches.describe(x)}, "
        f"sample_weight=...). Use {method}(x, y, sample_weight=w), or data that yields (inputs, targets, weights)."
    )


def _as_weights(given: Any) -> Any:
    """Returns `sample_weight` as an array; integers are converted to floats, because they cannot be an index here."""
    if isinstance(given, list):
        given = np.asarray(given)
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        return given.astype("float32")
    return given
