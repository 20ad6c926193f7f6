"""Collating: one batch out of examples, and an example out of a batch.

Numbers and arrays are stacked on a new axis 0, strings become a list; tuples and
dicts stay what they are.
"""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np

from lockstep.core import batches
from lockstep.errors import BatchError


def plain(value: Any) -> Any:
    """A framework's array as numpy, sharing its memory where it can; anything else as it is."""
    if hasattr(value, "asnumpy"):  # numpy would read it one number at a time
        return value.asnumpy()
    known = hasattr(value, "__array__") or hasattr(value, "__array_interface__")  # the latter: Pillow's images
    if isinstance(value, np.ndarray | np.generic) or not known:
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except TypeError as error:
        raise BatchError(
            f"Examples are collated by numpy. It has no form for {batches.describe(value)}: {error}. "
            "Turn it into float32 first."
        ) from error


def stack(examples: Sequence[Any]) -> Any:
    """The batch that holds these examples.

    >>> stack([(np.zeros(2), 1, "a"), (np.ones(2), 2, "b")])
    (array([[0., 0.],
           [1., 1.]]), array([1, 2]), ['a', 'b'])
    """
    first = examples[0]
    if isinstance(first, Mapping):
        _check(examples, lambda each: isinstance(each, Mapping) and each.keys() == first.keys())
        return {key: stack([each[key] for each in examples]) for key in first}
    if isinstance(first, tuple) or _is_nest(first):
        _check(examples, lambda each: isinstance(each, tuple | list) and len(each) == len(first))
        parts = [stack(values) for values in zip(*examples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, str | bytes):
        return list(examples)
    arrays = [plain(each) for each in examples]
    if isinstance(arrays[0], np.ndarray | Number | np.generic | list):
        return _stacked(arrays)
    raise BatchError(
        "An example is made of arrays, numbers, strings, and tuples and dicts of these. "
        f"Got {batches.describe(first)}. Turn it into an array with .map(...)."
    )


def row(batch: Any, index: int) -> Any:
    """One example of a batch.

    >>> row((np.arange(4).reshape(2, 2), ["a", "b"]), 1)
    (array([2, 3]), 'b')
    """

    def leaf(value: Any) -> Any:
        return value[index] if batches.is_array(value) or isinstance(value, list) else value

    return batches.transform(batch, leaf)


def join(parts: Sequence[Any]) -> Any:
    """One batch out of several of one form, put end to end.

    >>> join([(np.arange(2), ["a", "b"]), (np.arange(1), ["c"])])
    (array([0, 1, 0]), ['a', 'b', 'c'])
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        values = [join(each) for each in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    if isinstance(first, list):
        return [value for part in parts for value in part]
    return np.concatenate(parts) if batches.is_array(first) else first


def copied(batch: Any) -> Any:
    """The same nest, its arrays in memory of their own."""

    def leaf(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(each) for each in value]
        return np.array(value) if isinstance(value, np.ndarray) else value

    return batches.transform(batch, leaf)


def _is_nest(example: Any) -> bool:
    """A list of numbers is an array; one of anything else is what loaders call a tuple."""
    return isinstance(example, list) and not all(isinstance(value, Number) for value in example)


def _stacked(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    if any(array.dtype.hasobject for array in arrays):
        raise BatchError(
            f"An example's arrays hold numbers. Got objects in {batches.describe(values[0])}. Convert them."
        )
    _check(arrays, lambda each: each.shape == arrays[0].shape)
    return np.stack(arrays)


def _check(examples: Sequence[Any], same: Any) -> None:
    for each in examples:
        if not same(each):
            raise BatchError(
                "The examples of a batch have one form. "
                f"Got {batches.describe(examples[0])} and {batches.describe(each)}. "
                "Cut or pad them to one size with .map(...)."
            )
