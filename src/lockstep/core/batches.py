"""The structures that a batch may have, and how a batch is split into shards.

A batch is a pytree of tuples and dicts. Arrays are split along axis 0, and lists like arrays; scalars and strings are
copied to every shard. The split depends only on the number of examples and the number of shards.

A batch may also be `Rows`: not the examples themselves, but a reference to examples of a pipeline.
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
    """A reference to a batch of a pipeline, or to one shard of it. Each process reads the examples of its own shards.

    >>> [len(piece) for piece in cut(Rows(None, epoch=0, batch=3, num_examples=5), 2)]
    [3, 2]
    """

    pipeline: Any  # a Pipeline; in a message to a worker, the number by which the worker knows the pipeline
    epoch: int
    batch: int
    num_examples: int  # in the whole batch
    shard: int = 0
    num_shards: int = 1
    only_inputs: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The positions in the batch at which this shard starts and stops, as in `plan.bounds`."""
        size, extra = divmod(self.num_examples, self.num_shards)
        start = self.shard * size + min(self.shard, extra)
        return start, start + size + (self.shard < extra)

    def __len__(self) -> int:
        """Returns the number of examples of this shard."""
        start, stop = self.bounds
        return stop - start


def is_array(value: Any) -> bool:
    """Returns whether `value` is an array of any framework with at least one axis."""
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) > 0 and hasattr(value, "__getitem__")


def transform(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns a copy of the pytree with the function `leaf` applied to every value that is not a tuple or a dict."""
    if isinstance(batch, tuple):
        values = [transform(value, leaf) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, Mapping):
        return {key: transform(value, leaf) for key, value in batch.items()}
    return leaf(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Yields the values of the pytree that are not tuples or dicts, in order."""
    if isinstance(batch, tuple):
        for value in batch:
            yield from leaves(value)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    else:
        yield batch


def restore_tuples(batch: Any) -> Any:
    """Converts a list to a tuple if the loader used the list as a tuple, for example `[inputs, targets]`.

    A list of arrays whose entries are single examples stays a list. Its entries are taken as examples if their lengths
    differ from each other, or from the lengths of the arrays and lists beside the list.

    >>> restore_tuples([[np.zeros(2), np.ones(2)], ["a", "b"]])
    ((array([0., 0.]), array([1., 1.])), ['a', 'b'])
    >>> restore_tuples([[np.zeros(3), np.ones(3)], np.array([0, 1])])
    ([array([0., 0., 0.]), array([1., 1., 1.])], array([0, 1]))
    """
    if _is_flat(batch):
        return batch
    converted = _convert_lists(batch, inner=False)
    lists, lengths, beside = _measure_lists(converted)
    are_inputs = lists and len(lengths) == 1 and beside in (set(), lengths)
    return _convert_lists(batch, inner=True) if are_inputs else converted


def _is_flat(batch: Any) -> bool:
    """Returns whether `batch` is a plain tuple of arrays, as most batches are."""
    return type(batch) is tuple and all(map(is_array, batch))


def _convert_lists(batch: Any, inner: bool, outer: bool = True) -> Any:
    """Converts lists to tuples; lists of arrays inside another list or tuple only if `inner` is True."""
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
    """Returns a batch's lists of arrays, the lengths of the arrays in them, and the lengths of all other entries."""
    lists = [value for value in leaves(batch) if is_list_of_arrays(value)]
    lengths = {int(each.shape[0]) for value in lists for each in value}
    others = [value for value in leaves(batch) if not any(value is each for each in lists)]
    beside = {
        len(value) if isinstance(value, list) else int(value.shape[0]) for value in others if _has_examples(value)
    }
    return lists, lengths, beside


def several(batch: Any, always: bool = False) -> Any:
    """Converts a list of several inputs or outputs, as Keras uses such lists, to a tuple.

    In such a list each array has an entry for every example, so its length is that of the arrays and lists beside the
    list. In any other list each array is one example. With `always=True` every list of arrays is converted.

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
    """Returns whether `value` is a non-empty list of arrays: several inputs, or several examples."""
    return isinstance(value, list) and bool(value) and all(map(is_array, value))


def _has_examples(value: Any) -> bool:
    """Returns whether `value` has one entry per example."""
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
    values = batch if _is_flat(batch) else [value for value in leaves(batch) if _has_examples(value)]
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


def cut(batch: Any, num_shards: int, num_examples: int | None = None) -> list[Any]:
    """Splits a batch into `num_shards` shards, in order; the entry of a shard without examples is None.

    The examples are counted if their number is not given.

    >>> cut(np.arange(5), 2)
    [array([0, 1, 2]), array([3, 4])]
    """
    num_examples = num_examples or count(batch)
    ranges = bounds(num_examples, num_shards)
    if isinstance(batch, Rows):
        pieces = [replace(batch, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
        return [piece if len(piece) else None for piece in pieces]
    if _is_flat(batch) and batch:
        slices = [slice(*each) for each in ranges[:num_examples]]
        return [
            *zip(*[[array[each] for each in slices] for array in batch], strict=True),
            *[None] * (num_shards - len(slices)),
        ]
    return [None if start == stop else select(batch, slice(start, stop)) for start, stop in ranges]


def select(batch: Any, selection: Any) -> Any:
    """Selects examples by a slice or by indices from every array and list; scalars and strings are unchanged."""

    def leaf(value: Any) -> Any:
        if is_array(value):
            return value[selection]
        if isinstance(value, list):
            return value[selection] if isinstance(selection, slice) else [value[index] for index in selection]
        return value

    return transform(batch, leaf)


def join(pieces: list[Any], concatenate: Callable[[list[Any]], Any]) -> Any:
    """Concatenates the arrays of several pytrees with the same structure.

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


def fingerprint(batch: Any) -> int:
    """Returns a checksum of a batch: of its structure and of every byte of its arrays.

    The checksum of `Rows` covers their position in the data and the fingerprint of the pipeline, not their content.
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
    """Returns the structure and the shapes of a batch as text, for error messages.

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


def deal(
    batch: Any, plan: Plan, groups: list[list[int]], num_examples: int | None = None
) -> list[dict[int, dict[int, Any]]]:
    """Splits a batch for the processes: returns, for each group of replicas, each replica's shards by shard number.

    A group is the replicas of one process. Shards without examples are left out.

    >>> deal(np.arange(3), Plan.even(4, range(2)), [[0], [1]])
    [{0: {0: array([0]), 1: array([1])}}, {1: {2: array([2])}}]
    """
    pieces = cut(batch, plan.num_shards, num_examples)

    def get_shards(replica: int) -> dict[int, Any]:
        return {shard: pieces[shard] for shard in plan.shards_of([replica]) if pieces[shard] is not None}

    return [{replica: get_shards(replica) for replica in group} for group in groups]
