"""A source that reads a `tf.data.Dataset`, batched or not, in the controller.

A dataset gives batches, or single examples, which are put together into batches of the size asked for. The dataset
decides the order. A dataset that reshuffles gives each of its iterators another order, so iterator k is epoch k. To
resume in the middle of a run, the iterators of earlier epochs are created and dropped.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from lockstep.core.batches import restore_tuples
from lockstep.errors import BatchError, ExactError


def make_source(data: Any, batch_size: int) -> Any:
    """Returns a source that reads a `tf.data.Dataset`; None for any other data."""
    if isinstance(data, tf.distribute.DistributedDataset):
        raise BatchError(
            "The data is a distributed dataset, whose batches are split already, but Lockstep splits each batch "
            "itself. Give the tf.data.Dataset from which the distributed dataset was created."
        )
    return DatasetSource(data, batch_size) if isinstance(data, tf.data.Dataset) else None


# How many iterators of each dataset that reshuffles were created. A dataset can be read by several sources, one after
# the other, and its order depends on all of its iterators.
_num_iterators: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


class DatasetSource:
    """The batches of a dataset, in the dataset's own order."""

    once = False
    num_examples: int | None = None
    resumes = "by reading and dropping"

    def __init__(self, data: Any, batch_size: int) -> None:
        self._dataset = data
        self._shuffles = [step for step in _list_steps(data) if getattr(step, "_reshuffle_each_iteration", False)]
        self.batch_size: int | None = _find_batch_size(data)
        if self.batch_size is None:
            data, self.batch_size = data.batch(batch_size), batch_size
        elif self.batch_size == 0:  # the dataset gives batches of an unknown size
            self.batch_size = None
        self._batches = data
        cardinality = int(data.cardinality())
        self.endless = cardinality == tf.data.INFINITE_CARDINALITY
        self.num_steps: int | None = cardinality if cardinality >= 0 else None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the epoch's batches from `start` on; reads and drops the batches before `start`."""
        if self._shuffles:
            self._advance(index, start)
        return (_to_numpy(batch) for batch in islice(self._batches, start, None))

    def _advance(self, index: int, start: int) -> None:
        """Drops iterators until the next iterator has this epoch's order; raises ExactError if none can have it."""
        created = _num_iterators.get(self._dataset, 0)
        seeded = all(map(_has_seed, self._shuffles))
        # The first epoch may have any order. A later one needs iterator `index`, which cannot be created a second time,
        # and without a seed the order of an earlier run cannot be repeated.
        if (index or start) and (created > index or (not seeded and (index > created or start))):
            why, instead = f"it was read {created} times already", "Create the dataset again for each fit"
            if not seeded:
                why, instead = "its shuffle has no seed", "Use shuffle(..., seed=0)"
            raise ExactError(
                f"The dataset cannot repeat epoch {index + 1}{f' from batch {start}' if start else ''}: it shuffles in "
                f"another order each time it is read, and {why}. {instead}, or lockstep.data."
            )
        for _ in range(index - created):
            iter(self._batches)  # creating it is enough to change the order of the next
        _num_iterators[self._dataset] = max(index, created) + 1

    def state(self) -> Any:
        """Returns None, because a dataset has no state to save."""
        return None


def _find_batch_size(data: Any) -> int | None:
    """Returns the batch size; 0 if it is unknown, None if the dataset gives single examples.

    The shapes alone do not show the batch size: the first axis is unknown after `padded_batch` and, unless
    `drop_remainder` is set, after `batch`.
    """
    batching = _find_batching(data)
    if batching:
        shapes = [spec.shape for spec in tf.nest.flatten(data.element_spec)]
        size = getattr(batching, "_batch_size", None)  # not every such class has it
        return (0 if size is None else int(size)) or shapes[0][0] or 0
    shapes = [spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")]
    if any(shape.rank is None for shape in shapes):
        raise BatchError(
            "The dataset's elements have an unknown number of axes, so Lockstep cannot distinguish batches from single "
            "examples. Use dataset.batch(n), or set the shapes in the dataset's map function."
        )
    if all(shape.rank and shape[0] is None for shape in shapes):
        return 0  # batches of a generator: it gives the shape of a batch, whose first axis is unknown
    return None


# Parts of the names of TensorFlow's classes of transformations that make batches.
_BATCHING = ("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset", "RaggedBatch", "_MapAndBatchDataset")


def _list_steps(data: Any) -> Iterator[Any]:
    """Yields the transformations of a dataset, such as map and batch, from the last to the first."""
    yield data
    for each in data._inputs():
        yield from _list_steps(each)


def _find_batching(data: Any) -> Any:
    """Returns the transformation that makes batches; None if there is none, or if a later one splits the batches."""
    for step in _list_steps(data):
        kind = type(step).__name__
        if any(name in kind for name in ("Unbatch", "FlatMap", "Interleave")):
            return None
        if any(name in kind for name in _BATCHING):
            return step
    return None


def _has_seed(shuffle: Any) -> bool:
    """Returns whether a shuffle has a seed; both numbers are 0 if neither the script nor TensorFlow has set one."""
    return bool(shuffle._seed) or bool(shuffle._seed2)


def _to_numpy(batch: Any) -> Any:
    """Returns the batch with numpy arrays, which any process can split and send."""
    return restore_tuples(tf.nest.map_structure(_to_array, batch))


def _to_array(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise BatchError(
            f"A batch of the dataset has a {type(value).__name__}, but Lockstep only splits dense arrays. Use "
            "dataset.padded_batch(n), or call to_tensor() or tf.sparse.to_dense() in the dataset's map function."
        )
    array = value.numpy()
    return array if isinstance(array, np.ndarray) else np.asarray(array)
