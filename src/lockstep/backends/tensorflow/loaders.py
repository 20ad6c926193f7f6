"""Sources: `tf.data.Dataset`, batched or not, read in the controlling process.

A data set gives whole batches, or examples that are put together into batches of the
size asked for. Its order is its own. One that reshuffles has another order for each of
its readers, in turn, so that epoch k belongs to reader k: to go on in the middle of a run,
the readers before are opened and let go.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from lockstep.core.batches import top
from lockstep.errors import BatchError, ExactError


def of(data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
    """A source for a data set of TensorFlow's; None for anything else."""
    if isinstance(data, tf.distribute.DistributedDataset):
        raise BatchError("The batch is the whole batch. Got a distributed data set. Give the tf.data.Dataset itself.")
    return DatasetSource(data, batch_size) if isinstance(data, tf.data.Dataset) else None


_readers: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()  # how often a data set that reshuffles was read


class DatasetSource:
    """The batches of a data set, in its own order."""

    once = False
    num_examples: int | None = None
    resumes = "by reading and dropping"

    def __init__(self, data: Any, batch_size: int) -> None:
        self._whole = data
        self._shuffles = [step for step in _steps(data) if getattr(step, "_reshuffle_each_iteration", False)]
        self.batch_size: int | None = _batched(data)
        if self.batch_size is None:
            data, self.batch_size = data.batch(batch_size), batch_size
        elif self.batch_size == 0:  # batched, of a size that it does not say
            self.batch_size = None
        self._data = data
        found = int(data.cardinality())
        self.endless = found == tf.data.INFINITE_CARDINALITY
        self.num_steps: int | None = found if found >= 0 else None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The epoch's batches from `start` on; those before are read and dropped."""
        if self._shuffles:
            self._advance(index, start)
        return (_numpy(batch) for batch in islice(self._data, start, None))

    def _advance(self, index: int, start: int) -> None:
        """Brings a data set that reshuffles to its epoch: it has another order for each of its readers, in turn."""
        readers = _readers.get(self._whole, 0)
        seeded = all(map(_seeded, self._shuffles))
        if (index or start) and (readers > index or (not seeded and (index > readers or start))):
            why, instead = f"it was read {readers} times already", "Make the data set anew for each fit"
            if not seeded:
                why, instead = "its shuffle has no seed", "Use shuffle(..., seed=0)"
            raise ExactError(
                f"A data set that shuffles has another order for each of its readers. Epoch {index + 1}"
                f"{f' from batch {start}' if start else ''} cannot be had again: {why}. {instead}, or lockstep.data."
            )
        for _ in range(index - readers):
            iter(self._data)
        _readers[self._whole] = max(index, readers) + 1

    def state(self) -> Any:
        """A data set says nothing."""
        return None


def _batched(data: Any) -> int | None:
    """The batch size; 0 where there is one of unknown size, None where the data set gives single examples.

    `batch` leaves the first axis unknown, unless it drops the remainder; so does padding.
    """
    if _walk(data):
        shapes = [spec.shape for spec in tf.nest.flatten(data.element_spec)]
        return _size(data) or (shapes[0][0] or 0)
    shapes = [spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")]
    if any(shape.rank is None for shape in shapes):
        raise BatchError(
            "A data set says which axis counts the examples. Got elements of unknown rank. "
            "Use dataset.batch(n), or set the shapes in its map function."
        )
    if all(shape.rank and shape[0] is None for shape in shapes):
        return 0  # from a generator of batches
    return None


_BATCHING = ("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset", "RaggedBatch", "_MapAndBatchDataset")


def _steps(data: Any) -> Iterator[Any]:
    """The steps of a pipeline, the last one first."""
    yield data
    for each in data._inputs():
        yield from _steps(each)


def _walk(data: Any) -> Any:
    """The step of the pipeline that makes batches, if there is one after the last `unbatch`."""
    for step in _steps(data):
        kind = type(step).__name__
        if any(name in kind for name in ("Unbatch", "FlatMap", "Interleave")):
            return None
        if any(name in kind for name in _BATCHING):
            return step
    return None


def _seeded(shuffle: Any) -> bool:
    return bool(shuffle._seed) or bool(shuffle._seed2)


def _size(data: Any) -> int:
    step = _walk(data)
    size = getattr(step, "_batch_size", None)
    return 0 if size is None else int(size)


def _numpy(batch: Any) -> Any:
    """A batch with numpy arrays, which any process can cut and send."""
    return top(tf.nest.map_structure(_array, batch))


def _array(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise BatchError(
            f"A batch's arrays are dense. Got a {type(value).__name__}. Use dataset.padded_batch(n), or to_tensor()."
        )
    found = value.numpy()
    return found if isinstance(found, np.ndarray) else np.asarray(found)
