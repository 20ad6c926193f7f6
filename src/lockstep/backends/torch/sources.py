"""Sources: torch's own data sets and loaders.

A loader is read in the controlling process, with its own workers. Its generators
are seeded from (seed, epoch) and its randomness kept apart from the script's.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from lockstep.core import seeds
from lockstep.core.batches import top
from lockstep.errors import BatchError


def of(data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
    """A source for a Dataset or a DataLoader; None for anything else."""
    if isinstance(data, DataLoader):
        return LoaderSource(data, seed)
    if isinstance(data, IterableDataset):
        return LoaderSource(DataLoader(data, batch_size=batch_size), seed)
    if isinstance(data, Dataset):
        return DatasetSource(data, batch_size, shuffle, seed)
    return None


class DatasetSource:
    """A map-style data set, read by index in the order of (seed, epoch)."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, seed: int) -> None:
        self._dataset = dataset
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.num_examples = len(dataset)
        self.num_steps = -(-len(dataset) // batch_size)

    def epoch(self, index: int) -> Iterator[Any]:
        """The batches of the epoch; random transforms draw from (seed, epoch)."""
        order = seeds.order(self._seed, index, self.num_examples) if self._shuffle else np.arange(self.num_examples)
        starts = range(0, self.num_examples, self.batch_size)
        return _apart((self._batch(order[start : start + self.batch_size]) for start in starts), self._seed, index)

    def _batch(self, indices: Any) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return default_collate(self._dataset.__getitems__(indices.tolist()))
        return default_collate([self._dataset[int(index)] for index in indices])


class LoaderSource:
    """A DataLoader, which has its own batch size, order and workers."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        if any(isinstance(sampler, DistributedSampler) for sampler in self._samplers):
            raise BatchError("The batch is the whole batch. Remove the sampler.")
        self._loader = loader
        self._seed = seed
        self.batch_size: int | None = loader.batch_size
        try:
            self.num_steps: int | None = len(loader)
            self.num_examples: int | None = len(loader.dataset)
        except TypeError:
            self.num_steps = self.num_examples = None

    def epoch(self, index: int) -> Iterator[Any]:
        """The loader's batches, its order seeded from (seed, epoch)."""

        def read() -> Iterator[Any]:
            for owner in (self._loader, *self._samplers):
                generator = getattr(owner, "generator", None)
                if generator is not None:
                    generator.manual_seed(seeds.derive("loader", self._seed, index))
            yield from self._loader

        return _apart(read(), self._seed, index)


def _apart(batches: Iterator[Any], seed: int, epoch: int) -> Iterator[Any]:
    """The same batches, with Python's, numpy's and torch's generators of their own while they are made."""
    theirs = _seeded(seeds.derive("loader", seed, epoch))
    while True:
        ours = _states()
        _set(theirs)
        try:
            batch = next(batches, None)
            theirs = _states()
        finally:
            _set(ours)
        if batch is None:
            return
        yield top(batch)


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def _set(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.random.set_rng_state(states[2])


def _seeded(seed: int) -> tuple[Any, Any, Any]:
    return (
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
        torch.Generator().manual_seed(seed).get_state(),
    )
