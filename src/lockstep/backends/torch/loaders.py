"""Sources that read torch's data loaders in the script's process, with the loader's own workers.

The loader's sampler chooses the examples and draws from random number generators of its own. Each example is read
with the global generators seeded from (seed, epoch, index), so neither the number of the loader's workers nor the
step at which a run is resumed changes a byte.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from lockstep.core import global_rng, huggingface, seeds
from lockstep.core.batches import describe, leaves, restore_tuples
from lockstep.core.find_rng import find_generators
from lockstep.core.global_rng import SeparateGenerators
from lockstep.core.local_rng import IsolatedGenerators, iterate_separately, seed_generators
from lockstep.errors import BatchError

# Arguments of the script's loader that are passed on to the one that reads for it. Not its generator, which belongs to
# the sampler: a loader with workers would draw from it once more.
_PASSED_ON = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)


def find_source(data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
    """Returns a source for a DataLoader or an IterableDataset; None for other data, and loaders with a state_dict."""
    stateful = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    if isinstance(data, IterableDataset) and not (stateful and huggingface.is_batched(data)):
        collate = _collate_examples if stateful else None
        return StreamLoaderSource(DataLoader(data, batch_size=batch_size, collate_fn=collate), seed)
    if stateful:
        return None
    if not isinstance(data, DataLoader):
        return None
    samplers = data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise BatchError(
            "Lockstep splits each batch over the devices itself. Got a DistributedSampler, which gives every process "
            "other examples. Remove it from the DataLoader."
        )
    return (StreamLoaderSource if isinstance(data.dataset, IterableDataset) else LoaderSource)(data, seed)


class _Source:
    """A DataLoader as a source of batches, with its numbers of steps and examples (None if unknown)."""

    endless = once = False

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self.batch_size: int | None = loader.batch_size
        try:
            self.num_steps: int | None = len(loader)
            self.num_examples: int | None = len(loader.dataset)
        except TypeError:
            self.num_steps = self.num_examples = None

    def state(self) -> Any:
        """Returns None, because a DataLoader has no state to save."""
        return None


class StreamLoaderSource(_Source):
    """A DataLoader over an IterableDataset."""

    resumes = "by reading and dropping"

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Returns an epoch's batches from batch `start` on; earlier ones are read and dropped."""
        apart = global_rng.seed_loader(self._loader, self._seed, index)
        held = find_generators(self._loader.dataset, self._loader.collate_fn)
        seed_generators(held, seeds.derive("loader", self._seed, index))  # a resumed epoch begins with the same
        return map(restore_tuples, islice(iterate_separately(lambda: iter(self._loader), apart), start, None))


class LoaderSource(_Source):
    """A DataLoader over a map-style Dataset."""

    resumes = "by its sampler"

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        collates = loader.batch_sampler is not None
        self._keys = _ResumableSampler(loader.batch_sampler if collates else loader.sampler)
        options: dict[str, Any] = {name: getattr(loader, name) for name in _PASSED_ON}
        reading = (_BatchReader if collates else _AnswerReader)(loader.dataset, loader.collate_fn, seed)
        self._reading: DataLoader[Any] = DataLoader(
            reading, batch_size=None, sampler=self._keys, collate_fn=_keep_batch, **options
        )

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Returns an epoch's batches from batch `start` on; earlier ones are not read."""
        self._keys.begin(index, start, global_rng.seed_loader(self._loader, self._seed, index))
        apart = SeparateGenerators(seeds.derive("loader", self._seed, index))
        with apart:
            iterator = iter(self._reading)
        return map(restore_tuples, apart.iterate(iterator))


class _ResumableSampler:
    """Yields (epoch, what the loader's sampler yields), from batch `start` of an epoch on."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._begin: tuple[int, int, SeparateGenerators] | None = None

    def begin(self, epoch: int, start: int, apart: SeparateGenerators) -> None:
        self._begin = epoch, start, apart

    def __iter__(self) -> Iterator[Any]:
        assert self._begin is not None
        epoch, start, apart = self._begin
        with apart:
            found = iter(self._sampler)
        # A loader with workers reads ahead, so the sampler draws from generators of its own.
        return ((epoch, answer) for answer in islice(apart.iterate(found), start, None))

    def __len__(self) -> int:
        return len(self._sampler)


class _AnswerReader(Dataset[Any]):
    """The data set of a loader without automatic batching: reads the examples for whatever the sampler yields.

    The random number generators are seeded for each read, and restored afterwards."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, key: Any) -> Any:
        epoch, answer = key
        with IsolatedGenerators(self._dataset, self._collate) as isolated:
            found = self._read(isolated, epoch, answer)
            isolated.seed(seeds.derive("collate", self._seed, epoch, *_to_integers(answer)))
            return self._collate(found)

    def _read(self, isolated: IsolatedGenerators, epoch: int, answer: Any) -> Any:
        isolated.seed(seeds.derive("example", self._seed, epoch, *_to_integers(answer)))
        return self._dataset[answer]


class _BatchReader(_AnswerReader):
    """The data set of a loader with automatic batching: reads the examples of a batch sampler's list of indices."""

    def __getitem__(self, key: Any) -> Any:
        epoch, answer = key
        return super().__getitem__((epoch, answer if hasattr(answer, "__len__") else list(answer)))

    def _read(self, isolated: IsolatedGenerators, epoch: int, answer: Any) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            isolated.seed(seeds.derive("example", self._seed, epoch, *_to_integers(answer)))
            return self._dataset.__getitems__(answer)
        return [super(_BatchReader, self)._read(isolated, epoch, each) for each in answer]


def _collate_examples(examples: list[Any]) -> Any:
    """Collates examples of an IterableDataset with a state_dict; raises BatchError if each may be a batch.

    Loaders of complete batches have a state_dict too, and some are IterableDatasets.
    """
    sizes = {_length(leaf) for leaf in leaves(examples[0])}
    if len(sizes) == 1 and None not in sizes:
        (size,) = sizes
        raise BatchError(
            f"An IterableDataset with a state_dict may give examples, or whole batches. This one gives "
            f"{describe(examples[0])}, which may be one example or a batch of {size}. For examples use "
            "fit(DataLoader(dataset, batch_size=32)), for batches fit(DataLoader(dataset, batch_size=None))."
        )
    return default_collate(examples)


def _length(leaf: Any) -> int | None:
    """Returns the length of the axis that would count a batch's examples; None if there is none."""
    if isinstance(leaf, list):
        return len(leaf)
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else None


def _keep_batch(batch: Any) -> Any:
    return batch


def _to_integers(answer: Any) -> list[int]:
    """Returns what a sampler yields as integers, from which a seed is derived."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        return [number for each in answer for number in _to_integers(each)]
    return [int(answer) if isinstance(answer, Integral) else zlib.crc32(repr(answer).encode())]
