"""Batches: the structures a batch may have, and how it is split into shards.

A batch is a pytree of tuples and dicts. Its arrays are split on axis 0, its lists as lists; scalars and strings are
copied to every shard. The split depends on the number of examples and of shards only.

A batch may also be `Rows`: not the examples themselves, but a reference to them.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.core.plan import Plan, bounds
from lockstep.errors import BatchError

OBJECTIVE_EXAMPLE = """
    @lockstep.objective
    def loss(model, batch):
        return my_loss(model(batch["x"]), batch["y"])

    trainer = lockstep.wrap(model, optimizer, loss)"""


@dataclass(frozen=True)
class Rows:
    """A reference to a batch of a pipeline, or a shard of it. The process that computes a shard reads it.

    >>> [len(piece) for piece in cut(Rows(None, epoch=0, batch=3, num_examples=5), 2)]
    [3, 2]
    """

    pipeline: Any  # in a message to a worker, its number there
    epoch: int
    batch: int
    num_examples: int  # of the whole batch
    shard: int = 0
    num_shards: int = 1
    only_inputs: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The start and stop of this shard in its batch, as in `plan.bounds`."""
        size, extra = divmod(self.num_examples, self.num_shards)
        start = self.shard * size + min(self.shard, extra)
        return start, start + size + (self.shard < extra)

    def __len__(self) -> int:
        """The number of examples of this shard."""
        start, stop = self.bounds
        return stop - start


def is_array(value: Any) -> bool:
    """Returns whether `value` is an array of any framework with at least one axis."""
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) > 0 and hasattr(value, "__getitem__")


def transform(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the pytree with `leaf` applied to everything that is not a tuple or a dict."""
    if isinstance(batch, Mapping):
        return {key: transform(value, leaf) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [transform(value, leaf) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return leaf(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Yields everything in the pytree that is not a tuple or a dict, in order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, tuple):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def top(batch: Any) -> Any:
    """Returns the batch with the lists that loaders use as tuples converted to tuples.

    A list of arrays stays a list if each array is an example: that is if their lengths differ from those of the arrays
    and lists beside it, or from each other.

    >>> top([[np.zeros(2), np.ones(2)], ["a", "b"]])
    ((array([0., 0.]), array([1., 1.])), ['a', 'b'])
    >>> top([[np.zeros(3), np.ones(3)], np.array([0, 1])])
    ([array([0., 0., 0.]), array([1., 1., 1.])], array([0, 1]))
    """
    converted = _convert_lists(batch, inner=False)
    lists, lengths, beside = _measure_lists(converted)
    are_inputs = lists and len(lengths) == 1 and beside in (set(), lengths)
    return _convert_lists(batch, inner=True) if are_inputs else converted


def _convert_lists(batch: Any, inner: bool, outer: bool = True) -> Any:
    """Converts lists to tuples. Lists of arrays inside another list or tuple are converted only if `inner`."""
    if isinstance(batch, list):
        if is_list_of_arrays(batch) and not (inner or outer):
            return batch
        values = [_convert_lists(value, inner, outer=False) for value in batch]
        return tuple(values) if any(isinstance(each, tuple) or _is_splittable(each) for each in values) else batch
    if isinstance(batch, Mapping):
        return {key: _convert_lists(value, inner, outer=False) for key, value in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(_convert_lists(value, inner, outer=False) for value in batch)
    return batch


def _is_splittable(value: Any) -> bool:
    return is_array(value) or is_list_of_arrays(value)


def _measure_lists(batch: Any) -> tuple[list[Any], set[int], set[int]]:
    """Returns the lists of arrays, the lengths of their arrays, and the lengths of arrays and lists beside them."""
    lists = [value for value in leaves(batch) if is_list_of_arrays(value)]
    lengths = {int(each.shape[0]) for value in lists for each in value}
    others = [value for value in leaves(batch) if not any(value is each for each in lists)]
    beside = {
        len(value) if isinstance(value, list) else int(value.shape[0]) for value in others if _has_examples(value)
    }
    return lists, lengths, beside


def several(batch: Any, always: bool = False) -> Any:
    """Converts a list of several inputs or outputs, as in Keras, to a tuple.

    In such a list each array has all the examples, which is known if an array or list beside it has the same length. In
    any other list each array is one example. With `always` every list of arrays is converted.

    >>> several(([np.zeros(4), np.ones(4)], np.ones(4)))[0]
    (array([0., 0., 0., 0.]), array([1., 1., 1., 1.]))
    >>> several(([np.zeros(3), np.ones(3)], np.ones(2)))[0]
    [array([0., 0., 0.]), array([1., 1., 1.])]
    """
    lists, lengths, beside = _measure_lists(batch)
    are_inputs = beside == lengths and len(lengths) == 1 and not any(len(value) in lengths for value in lists)
    if not lists or not (always or are_inputs):
        return batch
    return transform(batch, lambda value: tuple(value) if any(value is each for each in lists) else value)


def is_list_of_arrays(value: Any) -> bool:
    """Returns whether this is a non-empty list of arrays: several inputs, or several examples."""
    return isinstance(value, list) and bool(value) and all(map(is_array, value))


def _has_examples(value: Any) -> bool:
    """Returns whether this has one entry per example."""
    return is_array(value) or isinstance(value, list)


def inputs(batch: Any) -> Any:
    """Returns the model's inputs: the batch without targets and weights."""
    if isinstance(batch, Rows):
        return replace(batch, only_inputs=True)
    return batch[0] if isinstance(batch, tuple) and len(batch) in (2, 3) else batch


def count(batch: Any) -> int:
    """Returns the number of examples in a batch.

    >>> count((np.zeros((5, 2)), {"a": ["u", "v", "w", "x", "y"]}, 0.5))
    5
    """
    if isinstance(batch, Rows):
        return len(batch)
    values = [value for value in leaves(batch) if _has_examples(value)]
    # By shape, because TensorFlow's variables have no len.
    lengths = [len(value) if isinstance(value, list) else int(value.shape[0]) for value in values]
    if not lengths:
        raise BatchError(
            f"The batch {describe(batch)} has no array with examples on its first axis. "
            f"Use (inputs, targets), or write an objective:\n{OBJECTIVE_EXAMPLE}"
        )
    if len(set(lengths)) > 1:
        raise BatchError(
            f"The arrays of a batch have different lengths, {', '.join(map(str, lengths))}, "
            f"in {describe(batch)}. Use arrays with one entry per example."
        )
    if lengths[0] == 0:
        raise BatchError(f"The batch {describe(batch)} has no examples. Leave empty batches out.")
    return lengths[0]


def cut(batch: Any, num_shards: int) -> list[Any]:
    """Splits a batch into its shards, in order; None marks a shard without examples.

    >>> cut(np.arange(5), 2)
    [array([0, 1, 2]), array([3, 4])]
    """
    ranges = bounds(count(batch), num_shards)
    if isinstance(batch, Rows):
        pieces = [replace(batch, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
        return [piece if len(piece) else None for piece in pieces]
    return [None if start == stop else select(batch, slice(start, stop)) for start, stop in ranges]


def select(batch: Any, selection: Any) -> Any:
    """Selects examples by a slice or indices from every array and list; the rest is unchanged."""

    def leaf(value: Any) -> Any:
        if is_array(value):
            return value[selection]
        if isinstance(value, list):
            return value[selection] if isinstance(selection, slice) else [value[index] for index in selection]
        return value

    return transform(batch, leaf)


def join(pieces: list[Any], concatenate: Callable[[list[Any]], Any]) -> Any:
    """Concatenates pytrees of arrays of equal structure.

    >>> join([(np.ones(2), [np.ones(2)]), (np.zeros(1), [np.zeros(1)])], np.concatenate)
    (array([1., 1., 0.]), [array([1., 1., 0.])])
    """
    first = pieces[0]
    if isinstance(first, Mapping):
        return {key: join([piece[key] for piece in pieces], concatenate) for key in first}
    if isinstance(first, tuple | list):
        parts = [join(list(values), concatenate) for values in zip(*pieces, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return concatenate(pieces)


def check_rows(outputs: Any, num_examples: int) -> None:
    """Raises if outputs are not a pytree of arrays with one row per example."""
    if isinstance(outputs, Mapping):
        values = list(outputs.values())
    elif isinstance(outputs, tuple | list):
        values = list(outputs)
    elif is_array(outputs) and len(outputs) == num_examples:
        return
    else:
        raise BatchError(
            f"The model returned {describe(outputs)} for {num_examples} examples. "
            "Return arrays, or tuples, lists and dicts of them, with one row per example on axis 0."
        )
    for value in values:
        check_rows(value, num_examples)


def fingerprint(batch: Any) -> int:
    """Returns a checksum of a batch: its structure, and every byte of its arrays.

    For `Rows` it covers which rows they are, and their pipeline's fingerprint.
    """
    number = 0
    for value in leaves(batch):
        number = zlib.crc32(describe(value).encode(), number)
        if isinstance(value, Rows):
            number = zlib.crc32(repr((value.pipeline.fingerprint, value.num_shards)).encode(), number)
            continue
        is_numeric = isinstance(value, np.ndarray) and value.dtype != object
        number = zlib.crc32(np.ascontiguousarray(value).data if is_numeric else repr(value).encode(), number)
    return number


def describe(batch: Any) -> str:
    """Returns the structure and shapes of a batch, for error messages.

    >>> describe((np.zeros((4, 2)), [1, 2], "text"))
    '(ndarray(4, 2), list of 2, str)'
    """
    if isinstance(batch, Rows):
        start, stop = batch.bounds
        return f"rows {start} to {stop - 1} of {batch.num_examples} in batch {batch.batch} of epoch {batch.epoch}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, tuple):
        return "(" + ", ".join(describe(value) for value in batch) + ")"
    if isinstance(batch, list):
        return f"list of {len(batch)}"
    shape = getattr(batch, "shape", None)
    return type(batch).__name__ + (f"{tuple(shape)}" if shape is not None else "")


def deal(batch: Any, plan: Plan, groups: list[list[int]]) -> list[dict[int, dict[int, Any]]]:
    """Returns the shards with examples, by replica, for each group of replicas (one group per process).

    >>> deal(np.arange(3), Plan.even(4, 2), [[0], [1]])
    [{0: {0: array([0]), 1: array([1])}}, {1: {2: array([2])}}]
    """
    pieces = cut(batch, plan.num_shards)

    def get_shards(replica: int) -> dict[int, Any]:
        return {shard: pieces[shard] for shard in plan.shards_of([replica]) if pieces[shard] is not None}

    return [{replica: get_shards(replica) for replica in group} for group in groups]
