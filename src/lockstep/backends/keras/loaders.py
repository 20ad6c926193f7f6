"""Sources: the data containers that Keras takes whatever it runs on."""

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import keras

from lockstep.core.batches import top
from lockstep.core.permutation import order


def of(data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
    """A source for a `keras.utils.PyDataset` or a `tf.data.Dataset`; None for anything else."""
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data, shuffle, seed)
    if "tensorflow" not in sys.modules:  # no data set of TensorFlow's without it
        return None
    from lockstep.backends.tensorflow import loaders

    return loaders.of(data, batch_size, shuffle, seed)


class PyDatasetSource:
    """Batches by index, in the order of (seed, epoch) where shuffled.

    Its `on_epoch_end` is called between epochs; a run that is resumed makes up for those it missed.
    """

    once = False
    num_examples: int | None = None
    batch_size: int | None = None
    resumes = "at once"

    def __init__(self, data: Any, shuffle: bool, seed: int) -> None:
        self._data, self._shuffle, self._seed = data, shuffle, seed
        self._ended = 0  # epochs that the data set was told of
        self.num_steps: int | None = data.num_batches
        self.endless = self.num_steps is None

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The batches of the epoch from `start` on."""
        for _ in range(self._ended, index):
            self._data.on_epoch_end()
        self._ended = max(index, self._ended)
        steps = self.num_steps
        found = order(self._seed, index, steps) if self._shuffle and steps is not None else None
        for number in count(start) if steps is None else range(start, steps):
            place = number if found is None else int(found.between(number, number + 1)[0])
            yield top(_plain(self._data[place]))

    def state(self) -> Any:
        """A data set says nothing."""
        return None


def _plain(batch: Any) -> Any:
    """A batch as Keras takes it, (x, y) or (x, y, w), where the rest may be None."""
    if not isinstance(batch, tuple | list):
        return batch
    parts = list(batch)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    return tuple(parts) if len(parts) > 1 else parts[0]
