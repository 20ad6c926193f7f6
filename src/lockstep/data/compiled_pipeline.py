"""A compiled pipeline: its steps, split into moves, which choose examples, and stages, which compute them.

Moves (shuffle, take, repeat) determine which example of the input is at which position. Stages (map stages and caches)
determine how an example is computed. Moves and stages are independent of each other: a cache stores examples by their
index, so the order changes in every epoch, whether `.shuffle` comes before or after `.cache`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.batches import Rows
from lockstep.data import cache_identity
from lockstep.data.cache import Cache
from lockstep.data.map_stage import Map, MapStage
from lockstep.data.order import Move, Order, Repeat, Shuffle
from lockstep.data.pipeline_inputs import Arrays, Indexed, Input, compute_checksum
from lockstep.errors import BatchError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The `.batch` step of a pipeline: groups examples into batches of `size`, counted over all devices."""

    size: int
    drop_last: bool


@dataclass(frozen=True)
class Prefetch:
    """The `.prefetch` step of a pipeline: prepares the next `num` batches in advance."""

    num: int


Step = Move | Map | Cache | Batch | Prefetch


class CompiledPipeline:
    """The moves, stages and batches of a pipeline.

    `identities` are the hashes of its caches, which a worker gets with the pipeline because it cannot compute them.
    """

    def __init__(
        self, input: Input, steps: Sequence[Step], workers: int | None, identities: Mapping[int, str] | None = None
    ) -> None:
        self.input = input
        self.batch = next((step for step in steps if isinstance(step, Batch)), Batch(1, False))
        self.num_prefetched = max((step.num for step in steps if isinstance(step, Prefetch)), default=0)
        self.seed = next((step.seed for step in reversed(steps) if isinstance(step, Shuffle)), 0)
        self.stages = _split_stages(input, steps, self.seed)
        self.workers = self._choose_workers(workers)
        batch_index = next((index for index, step in enumerate(steps) if isinstance(step, Batch)), len(steps))
        self.moves = [step for step in steps[:batch_index] if isinstance(step, Move)]
        self.batch_moves = [step for step in steps[batch_index:] if isinstance(step, Move)]
        self._identities = dict(identities or {})  # by the index of the cache among the stages
        # The last result of `_get_range`, because every shard of a batch asks for it.
        self._last_range: tuple[tuple[int, int], tuple[int, int, int]] | None = None

    @cached_property
    def map_stages(self) -> list[MapStage]:
        """The stages that run the script's code."""
        return [stage for stage in self.stages if isinstance(stage, MapStage)]

    @cached_property
    def is_read_in_workers(self) -> bool:
        """Whether each process reads the examples of its own shards; otherwise the script's process reads all."""
        return bool(self.stages) or self.input.is_mapped

    @cached_property
    def examples(self) -> Order:
        """The order of examples."""
        assert self.input.num_examples is not None
        return Order(self.input.num_examples, self.moves)

    @cached_property
    def batches(self) -> Order:
        """The order of batches, which is infinite if the order of examples is."""
        num = self.examples.num
        size = self.batch.size
        if num is None:
            return Order(2**62, self.batch_moves or [Repeat()])
        steps = num // size if self.batch.drop_last else -(-num // size)
        if steps == 0:
            raise BatchError(
                f"The epoch has no batch, because .batch({size}, drop_last=True) drops all of its {num} examples. Use "
                "a smaller batch size, or drop_last=False."
            )
        return Order(steps, self.batch_moves)

    def count_examples(self, epoch: int, batch: int) -> int:
        """Returns the number of examples of a batch."""
        _, start, stop = self._get_range(epoch, batch)
        return stop - start

    def locate(self, pieces: Sequence[Rows]) -> tuple[Indices, Indices]:
        """Returns the epoch and the index of each example in these pieces, one piece after another."""
        ranges: list[tuple[int, int, int]] = []  # epoch, start and stop; adjacent pieces are merged
        for piece in pieces:
            epoch, first, _ = self._get_range(piece.epoch, piece.batch)
            start, stop = (first + position for position in piece.bounds)
            if ranges and ranges[-1][0] == epoch and ranges[-1][2] == start:
                start = ranges.pop()[1]
            ranges.append((epoch, start, stop))
        located = [self.examples.locate(*each) for each in ranges]
        epochs, indices = (
            np.concatenate(parts) if len(located) > 1 else parts[0] for parts in zip(*located, strict=True)
        )
        return epochs, indices

    def get_next(self, rows: Rows) -> Rows:
        """Returns the rows of the same shard in the next batch, which may be the first batch of the next epoch."""
        is_last = self.batches.num is not None and rows.batch + 1 >= self.batches.num
        epoch, batch = (rows.epoch + 1, 0) if is_last else (rows.epoch, rows.batch + 1)
        num_examples = self.count_examples(epoch, batch)
        return Rows(None, epoch, batch, num_examples, rows.shard, rows.num_shards, rows.only_inputs)

    @cached_property
    def fingerprint(self) -> int:
        """A checksum of the pipeline's structure and of a few examples of its input."""
        maps = [
            f"{each.random} {each.batched} {getattr(each.function, '__qualname__', type(each.function).__qualname__)}"
            for stage in self.map_stages
            for each in stage.maps
        ]
        parts = self.input.description, self.moves, self.batch, self.batch_moves, len(self.stages), maps
        return compute_checksum(repr(parts))

    def compute_identity(self, depth: int) -> str:
        """Returns a hash of the data and the code that come before the cache at index `depth` of the stages.

        If the cache has a key, the key is hashed instead of the functions and the data set.
        """
        if depth not in self._identities:
            cache = self.stages[depth]
            assert isinstance(cache, Cache)
            stages = [stage for stage in self.stages[:depth] if isinstance(stage, MapStage)]
            below: Any
            if cache.key is None:
                below = cache_identity.hash_input(self.input), [cache_identity.hash_stage(stage) for stage in stages]
            else:
                is_arrays = isinstance(self.input, Arrays)
                data = cache_identity.hash_input(self.input) if is_arrays else self.input.num_examples
                below = data, [stage.seed for stage in stages], f"key {cache.key}"
            self._identities[depth] = hashlib.sha256(repr(below).encode()).hexdigest()
        return self._identities[depth]

    def compute_identities(self) -> dict[int, str]:
        """Returns the identity of every cache that is stored in a file, by the index of its stage."""
        files = [depth for depth, stage in enumerate(self.stages) if isinstance(stage, Cache) and stage.path]
        return {depth: self.compute_identity(depth) for depth in files}

    def _get_range(self, epoch: int, batch: int) -> tuple[int, int, int]:
        """Returns the epoch of a batch's examples, and the range (start, stop) of their positions in this epoch."""
        last = self._last_range
        if last is None or last[0] != (epoch, batch):
            self._last_range = last = (epoch, batch), self._compute_range(epoch, batch)
        return last[1]

    def _compute_range(self, epoch: int, batch: int) -> tuple[int, int, int]:
        if self.examples.num is None:  # one infinite order of examples; an epoch continues where the last one ended
            number = batch + epoch * (self.batches.num or 0)
            return 0, number * self.batch.size, (number + 1) * self.batch.size
        epochs, numbers = self.batches.locate(epoch, batch, batch + 1)
        start = int(numbers[0]) * self.batch.size
        return int(epochs[0]), start, min(start + self.batch.size, self.examples.num)

    def _choose_workers(self, workers: int | None) -> int:
        if not self.map_stages:
            return 0
        if workers == 0 and self.num_prefetched:
            raise BatchError(
                "workers=0 cannot be used with .prefetch in this pipeline, because Python code computes its examples: "
                "the code would run in a thread beside training, and both would draw from the same process-wide random "
                "number generators. Use workers=1 or more, or leave .prefetch out."
            )
        return int(bool(self.num_prefetched)) if workers is None else workers


def _split_stages(input: Input, steps: Sequence[Step], seed: int) -> list[MapStage | Cache]:
    """Returns the map stages and caches of a pipeline in order; the first map stage also reads a data set."""
    stages: list[MapStage | Cache] = []
    dataset: Any = input.dataset if isinstance(input, Indexed) else None
    maps: list[Map] = []

    def close_stage(is_cached: bool) -> None:
        nonlocal dataset
        if dataset is not None or maps:
            number = sum(isinstance(stage, MapStage) for stage in stages)
            stages.append(MapStage(dataset, tuple(maps), seed, number, is_cached))
        dataset = None
        maps.clear()

    for step in steps:
        if isinstance(step, Map):
            maps.append(step)
        elif isinstance(step, Cache):
            close_stage(is_cached=True)
            stages.append(step)
    close_stage(is_cached=False)
    return stages
