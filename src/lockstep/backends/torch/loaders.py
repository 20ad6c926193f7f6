"""Sources: torch's own loaders, read in the controlling process with their own workers.

The loader's sampler says which examples come, and runs with generators of its own.
Each example is read with the global generators seeded from (seed, epoch, index), so
neither the number of the loader's workers nor the place where a run was resumed
changes a byte.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from lockstep.core import global_rng, huggingface, seeds
from lockstep.core.batches import describe, leaves, top
from lockstep.core.find_rng import find_generators
from lockstep.core.global_rng import SeparateGenerators
from lockstep.core.local_rng import IsolatedGenerators, iterate_separately, seed_generators
from lockstep.errors import BatchError

# What a loader was made with, and passes on to the one that reads in its place. Not its generator, which belongs to
# the sampler: it would be drawn from once more where the loader has workers.
_PASSED_ON = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)


def of(data: Any, batch_size: int, shuffle: bool, seed: int) -> Any:
    """A source for a DataLoader or a stream of examples; None for anything else, also for what keeps its own state."""
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
        raise BatchError("The batch is the whole batch. Remove the sampler.")
    return (StreamLoaderSource if isinstance(data.dataset, IterableDataset) else LoaderSource)(data, seed)


class _Source:
    """What both have in common: the loader's own batch size, order and workers."""

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
        """A DataLoader says nothing."""
        return None


class StreamLoaderSource(_Source):
    """A loader over a stream of examples."""

    resumes = "by reading and dropping"

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The loader's batches; those before `start` are read and dropped."""
        apart = global_rng.seed_loader(self._loader, self._seed, index)
        held = find_generators(self._loader.dataset, self._loader.collate_fn)
        seed_generators(held, seeds.derive("loader", self._seed, index))  # a resumed epoch begins with the same
        return map(top, islice(iterate_separately(lambda: iter(self._loader), apart), start, None))


class LoaderSource(_Source):
    """A loader over a data set with examples by index."""

    resumes = "by its sampler"

    def __init__(self, loader: Any, seed: int) -> None:
        super().__init__(loader, seed)
        collates = loader.batch_sampler is not None
        self._keys = _Keys(loader.batch_sampler if collates else loader.sampler)
        options: dict[str, Any] = {name: getattr(loader, name) for name in _PASSED_ON}
        reading = (_Batches if collates else _Answers)(loader.dataset, loader.collate_fn, seed)
        self._reading: DataLoader[Any] = DataLoader(
            reading, batch_size=None, sampler=self._keys, collate_fn=_as_it_is, **options
        )

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The loader's batches from `start` on; nothing is read of those before."""
        self._keys.begin(index, start, global_rng.seed_loader(self._loader, self._seed, index))
        apart = SeparateGenerators(seeds.derive("loader", self._seed, index))
        with apart:
            iterator = iter(self._reading)
        return map(top, apart.iterate(iterator))


class _Keys:
    """The sampler's answers, each with its epoch, from one of them on."""

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
        # A loader with workers asks ahead: the sampler's draws are its own.
        return ((epoch, answer) for answer in islice(apart.iterate(found), start, None))

    def __len__(self) -> int:
        return len(self._sampler)


class _Answers(Dataset[Any]):
    """What a loader that does not collate makes of a sampler's answer, read with generators of its own."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, key: Any) -> Any:
        epoch, answer = key
        with IsolatedGenerators(self._dataset, self._collate) as isolated:
            found = self._read(isolated, epoch, answer)
            isolated.seed(seeds.derive("collate", self._seed, epoch, *_numbers(answer)))
            return self._collate(found)

    def _read(self, isolated: IsolatedGenerators, epoch: int, answer: Any) -> Any:
        isolated.seed(seeds.derive("example", self._seed, epoch, *_numbers(answer)))
        return self._dataset[answer]


class _Batches(_Answers):
    """What a loader that collates makes of a batch sampler's answer."""

    def __getitem__(self, key: Any) -> Any:
        epoch, answer = key
        return super().__getitem__((epoch, answer if hasattr(answer, "__len__") else list(answer)))

    def _read(self, isolated: IsolatedGenerators, epoch: int, answer: Any) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            isolated.seed(seeds.derive("example", self._seed, epoch, *_numbers(answer)))
            return self._dataset.__getitems__(answer)
        return [super(_Batches, self)._read(isolated, epoch, each) for each in answer]


def _collate_examples(examples: list[Any]) -> Any:
    """Collates what an IterableDataset with a state_dict gives, if it can be nothing but examples.

    Loaders of whole batches have a state_dict, too, and are IterableDatasets now and then.
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
    """Returns the length of the axis that would count a batch's examples; None where there is none."""
    if isinstance(leaf, list):
        return len(leaf)
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else None


def _as_it_is(batch: Any) -> Any:
    return batch


def _numbers(answer: Any) -> list[int]:
    """What a sampler answered, for a seed."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        return [number for each in answer for number in _numbers(each)]
    return [int(answer) if isinstance(answer, Integral) else zlib.crc32(repr(answer).encode())]
