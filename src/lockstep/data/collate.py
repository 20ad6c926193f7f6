"""Stacks examples into a batch, and selects examples from a batch.

Numbers and arrays are stacked along a new axis 0, and strings are collected in a list; tuples and dicts keep their
structure.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np

from lockstep.core import batches
from lockstep.errors import BatchError


def to_numpy(value: Any) -> Any:
    """Returns a framework's array as a numpy array, without a copy if possible; any other value unchanged."""
    if hasattr(value, "asnumpy"):  # MXNet; numpy would read it element by element
        return value.asnumpy()
    # Pillow's images have only `__array_interface__`.
    is_array_like = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if isinstance(value, np.ndarray | np.generic) or not is_array_like:
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except TypeError as error:
        raise BatchError(
            f"{batches.describe(value)} cannot be converted to numpy, which stacks the examples: {error}. Convert the "
            "array to float32 first."
        ) from error


def stack(examples: Sequence[Any]) -> Any:
    """Returns the examples stacked into a batch; raises BatchError if their structures or shapes differ.

    >>> stack([(np.zeros(2), 1, "a"), (np.ones(2), 2, "b")])
    (array([[0., 0.],
           [1., 1.]]), array([1, 2]), ['a', 'b'])
    """
    first = examples[0]
    if isinstance(first, Mapping):
        _check(examples, lambda each: isinstance(each, Mapping) and each.keys() == first.keys())
        return {key: stack([each[key] for each in examples]) for key in first}
    if isinstance(first, tuple) or _is_structure(first):
        _check(examples, lambda each: isinstance(each, tuple | list) and len(each) == len(first))
        parts = [stack(values) for values in zip(*examples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, str | bytes):
        return list(examples)
    arrays = [to_numpy(each) for each in examples]
    if isinstance(arrays[0], np.ndarray | Number | np.generic | list):
        return _stack_arrays(arrays)
    raise BatchError(
        f"An example contains {batches.describe(first)}, which cannot be stacked. Convert the value with .map(...) to "
        "arrays, numbers, strings, or tuples and dicts of these."
    )


def select_example(batch: Any, index: int) -> Any:
    """Returns the example at position `index` of a batch.

    >>> select_example((np.arange(4).reshape(2, 2), ["a", "b"]), 1)
    (array([2, 3]), 'b')
    """

    def select(value: Any) -> Any:
        return value[index] if batches.is_array(value) or isinstance(value, list) else value

    return batches.transform(batch, select)


def concatenate(parts: Sequence[Any]) -> Any:
    """Returns one batch with the examples of several batches, which must have the same structure.

    >>> concatenate([(np.arange(2), ["a", "b"]), (np.arange(1), ["c"])])
    (array([0, 1, 0]), ['a', 'b', 'c'])
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        values = [concatenate(each) for each in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    if isinstance(first, list):
        return [value for part in parts for value in part]
    return np.concatenate(parts) if batches.is_array(first) else first


def copy_arrays(batch: Any) -> Any:
    """Returns a batch with copies of the numpy arrays; all other values are the same objects."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy_arrays(each) for each in value]
        return np.array(value) if isinstance(value, np.ndarray) else value

    return batches.transform(batch, copy)


def _is_structure(example: Any) -> bool:
    """Returns whether `example` is a list used as a tuple. A list of numbers is stacked like an array instead."""
    return isinstance(example, list) and not all(isinstance(value, Number) for value in example)


def _stack_arrays(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    if any(array.dtype.hasobject for array in arrays):
        raise BatchError(
            f"An example contains {batches.describe(values[0])} whose elements are Python objects, which cannot be "
            "stacked. Convert the elements to numbers with .map(...)."
        )
    _check(arrays, lambda each: each.shape == arrays[0].shape)
    return np.stack(arrays)


def _check(examples: Sequence[Any], is_same: Callable[[Any], bool]) -> None:
    for each in examples:
        if not is_same(each):
            raise BatchError(
                f"Examples of different structure or shape cannot be stacked: {batches.describe(examples[0])} and "
                f"{batches.describe(each)}. Make the examples equal with .map(...), for example by cutting or padding "
                "arrays to one size."
            )
