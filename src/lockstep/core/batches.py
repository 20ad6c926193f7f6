"""Batches: the forms a batch may have, and how it is cut into shards.

A batch is a nest of tuples and dicts. Its arrays are cut on axis 0, its lists as
lists; scalars and strings go to every shard. The cut is a rule of the number of
examples and of shards alone.

A batch may also be `Rows`: not the examples, but which ones they are.
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
    """A batch of a pipeline, or a shard of it, by reference: it is read where it is computed.

    >>> [len(piece) for piece in cut(Rows(None, epoch=0, batch=3, num_examples=5), 2)]
    [3, 2]
    """

    pipeline: Any  # on the way to a worker, the number by which the worker knows it
    epoch: int
    batch: int
    num_examples: int  # of the whole batch
    shard: int = 0
    num_shards: int = 1
    only_inputs: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this shard starts and stops in its batch: an entry of `plan.bounds`, without the others."""
        size, extra = divmod(self.num_examples, self.num_shards)
        start = self.shard * size + min(self.shard, extra)
        return start, start + size + (self.shard < extra)

    def __len__(self) -> int:
        """The number of examples of this shard."""
        start, stop = self.bounds
        return stop - start


def is_array(value: Any) -> bool:
    """Whether `value` is an array with an axis to cut, of whatever framework."""
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) > 0 and hasattr(value, "__getitem__")


def transform(batch: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same nest with `leaf` of everything that is not a tuple or a dict."""
    if isinstance(batch, Mapping):
        return {key: transform(value, leaf) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [transform(value, leaf) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return leaf(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in the nest that is not a tuple or a dict, in order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, tuple):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def top(batch: Any) -> Any:
    """The batch with lists, as loaders make them, turned into tuples.

    A list of arrays stays one where they are examples: they have other lengths than the arrays and lists beside it,
    or than one another.

    >>> top([[np.zeros(2), np.ones(2)], ["a", "b"]])
    ((array([0., 0.]), array([1., 1.])), ['a', 'b'])
    >>> top([[np.zeros(3), np.ones(3)], np.array([0, 1])])
    ([array([0., 0., 0.]), array([1., 1., 1.])], array([0, 1]))
    """
    found = _opened(batch, inner=False)
    lists, lengths, shown = _told(found)
    return _opened(batch, inner=True) if lists and len(lengths) == 1 and shown in (set(), lengths) else found


def _opened(batch: Any, inner: bool, outer: bool = True) -> Any:
    """The batch with lists turned into tuples; lists of arrays only outside of all others, or where `inner` says so."""
    if isinstance(batch, list):
        if is_list_of_arrays(batch) and not (inner or outer):
            return batch
        values = [_opened(value, inner, outer=False) for value in batch]
        return tuple(values) if any(isinstance(each, tuple) or _is_cut(each) for each in values) else batch
    if isinstance(batch, Mapping):
        return {key: _opened(value, inner, outer=False) for key, value in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(_opened(value, inner, outer=False) for value in batch)
    return batch


def _is_cut(value: Any) -> bool:
    return is_array(value) or is_list_of_arrays(value)


def _told(batch: Any) -> tuple[list[Any], set[int], set[int]]:
    """The lists of arrays, the lengths of their arrays, and the lengths of what stands beside the lists."""
    lists = [value for value in leaves(batch) if is_list_of_arrays(value)]
    lengths = {int(each.shape[0]) for value in lists for each in value}
    beside = [value for value in leaves(batch) if not any(value is each for each in lists)]
    shown = {len(value) if isinstance(value, list) else int(value.shape[0]) for value in beside if _counts(value)}
    return lists, lengths, shown


def several(batch: Any, always: bool = False) -> Any:
    """The batch with several inputs or outputs in a list, as Keras's users write them, in a tuple.

    The arrays of such a list have all the examples, as something beside the lists shows: an array or a plain list of
    the same length. Any other list has an entry for each example; with `always`, no list of arrays has.

    >>> several(([np.zeros(4), np.ones(4)], np.ones(4)))[0]
    (array([0., 0., 0., 0.]), array([1., 1., 1., 1.]))
    >>> several(([np.zeros(3), np.ones(3)], np.ones(2)))[0]
    [array([0., 0., 0.]), array([1., 1., 1.])]
    """
    lists, lengths, shown = _told(batch)
    told = shown == lengths and len(lengths) == 1 and not any(len(value) in lengths for value in lists)
    if not lists or not (always or told):
        return batch
    return transform(batch, lambda value: tuple(value) if any(value is each for each in lists) else value)


def is_list_of_arrays(value: Any) -> bool:
    """Whether this is several inputs, or several batches of them, or examples."""
    return isinstance(value, list) and bool(value) and all(map(is_array, value))


def _counts(value: Any) -> bool:
    """Whether this has an entry for every example."""
    return is_array(value) or isinstance(value, list)


def inputs(batch: Any) -> Any:
    """What a model is called with: the batch without targets and weights."""
    if isinstance(batch, Rows):
        return replace(batch, only_inputs=True)
    return batch[0] if isinstance(batch, tuple) and len(batch) in (2, 3) else batch


def count(batch: Any) -> int:
    """The number of examples in a batch.

    >>> count((np.zeros((5, 2)), {"a": ["u", "v", "w", "x", "y"]}, 0.5))
    5
    """
    if isinstance(batch, Rows):
        return len(batch)
    counted = [value for value in leaves(batch) if _counts(value)]
    # TensorFlow's variables have a shape and no len.
    lengths = [len(value) if isinstance(value, list) else int(value.shape[0]) for value in counted]
    if not lengths:
        raise BatchError(
            f"A batch holds at least one array whose first axis counts the examples. Got {describe(batch)}. "
            f"Give (inputs, targets), or write an objective:\n{OBJECTIVE_EXAMPLE}"
        )
    if len(set(lengths)) > 1:
        raise BatchError(
            f"Every array of a batch has one entry per example. Got lengths {', '.join(map(str, lengths))} "
            f"in {describe(batch)}. Give arrays of equal length."
        )
    if lengths[0] == 0:
        raise BatchError("A batch holds at least one example. Got a batch of size 0. Leave empty batches out.")
    return lengths[0]


def cut(batch: Any, num_shards: int) -> list[Any]:
    """The shards of a batch in order; None for a shard without examples.

    >>> cut(np.arange(5), 2)
    [array([0, 1, 2]), array([3, 4])]
    """
    places = bounds(count(batch), num_shards)
    if isinstance(batch, Rows):
        pieces = [replace(batch, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
        return [piece if len(piece) else None for piece in pieces]
    return [None if start == stop else select(batch, slice(start, stop)) for start, stop in places]


def select(batch: Any, where: Any) -> Any:
    """The examples `where` says (a slice, or indices) of every array and list; the rest as it is."""

    def leaf(value: Any) -> Any:
        if is_array(value):
            return value[where]
        if isinstance(value, list):
            return value[where] if isinstance(where, slice) else [value[index] for index in where]
        return value

    return transform(batch, leaf)


def join(pieces: list[Any], concatenate: Callable[[list[Any]], Any]) -> Any:
    """One nest out of equal nests of arrays, put end to end.

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
    """Raises where outputs are not nests of arrays with a row for every example."""
    if isinstance(outputs, Mapping):
        values = list(outputs.values())
    elif isinstance(outputs, tuple | list):
        values = list(outputs)
    elif is_array(outputs) and len(outputs) == num_examples:
        return
    else:
        raise BatchError(
            "A model's outputs are arrays, or tuples, lists and dicts of them, with one row per example on axis 0. "
            f"Got {describe(outputs)} for {num_examples} examples. Return such outputs."
        )
    for value in values:
        check_rows(value, num_examples)


def fingerprint(batch: Any) -> int:
    """A number that tells one batch from another: its forms, and every byte of its arrays.

    Of `Rows` it is which rows they are, and what tells their pipeline from another.
    """
    number = 0
    for value in leaves(batch):
        number = zlib.crc32(describe(value).encode(), number)
        if isinstance(value, Rows):
            number = zlib.crc32(repr((value.pipeline.fingerprint, value.num_shards)).encode(), number)
            continue
        plain = isinstance(value, np.ndarray) and value.dtype != object
        number = zlib.crc32(np.ascontiguousarray(value).data if plain else repr(value).encode(), number)
    return number


def describe(batch: Any) -> str:
    """A batch in a few words, for errors.

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
    """For every process its replicas, and for every replica its shards that have examples.

    >>> deal(np.arange(3), Plan.even(4, 2), [[0], [1]])
    [{0: {0: array([0]), 1: array([1])}}, {1: {2: array([2])}}]
    """
    pieces = cut(batch, plan.num_shards)

    def of(replica: int) -> dict[int, Any]:
        return {shard: pieces[shard] for shard in plan.shards_of([replica]) if pieces[shard] is not None}

    return [{replica: of(replica) for replica in group} for group in groups]
