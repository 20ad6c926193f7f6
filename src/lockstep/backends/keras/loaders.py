"""Sources that read the datasets which Keras takes on every framework: PyDataset and tf.data.Dataset."""

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import keras

from lockstep.core.batches import restore_tuples
from lockstep.core.permutation import order


def make_source(data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
    """Returns a source that reads a `keras.utils.PyDataset` or a `tf.data.Dataset`; None for any other data."""
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data, shuffle, seed)
    if "tensorflow" not in sys.modules:  # then it cannot be a dataset of TensorFlow
        return None
    from lockstep.backends.tensorflow import loaders

    return loaders.make_source(data, batch_size)


class PyDatasetSource:
    """The batches of a PyDataset, by index; if shuffled, in an order that follows from seed and epoch.

    The dataset's `on_epoch_end` is called between epochs. A resumed run first calls it once for every earlier epoch.
    """

    once = False
    num_examples: int | None = None
    batch_size: int | None = None
    resumes = "at once"

    def __init__(self, data: Any, shuffle: bool, seed: int) -> None:
        self._data, self._shuffle, self._seed = data, shuffle, seed
        self._num_ended = 0  # number of epochs for which `on_epoch_end` was called
        self.num_steps: int | None = data.num_batches
        self.endless = self.num_steps is None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of the epoch from `start` on."""
        for _ in range(self._num_ended, index):
            self._data.on_epoch_end()
        self._num_ended = max(index, self._num_ended)
        steps = self.num_steps
        permutation = order(self._seed, index, steps) if self._shuffle and steps is not None else None
        for position in count(start) if steps is None else range(start, steps):
            batch_index = position if permutation is None else int(permutation.between(position, position + 1)[0])
            yield restore_tuples(_strip_none(self._data[batch_index]))

    def state(self) -> Any:
        """Returns None, because a dataset has no state to save."""
        return None


def _strip_none(batch: Any) -> Any:
    """Returns a batch (x, y, w) without the entries at its end that are None."""
    if not isinstance(batch, tuple | list):
        return batch
    parts = list(batch)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    return tuple(parts) if len(parts) > 1 else parts[0]
