"""A chain: a pipeline taken apart into what moves examples and what makes them.

Moves (shuffle, take, repeat) say which example of the base stands where; stages
(segments of Python work, and caches) say what becomes of it. Neither depends on the
other, so a cache knows examples by their index, and an order changes every epoch
whether the shuffle stands above or below it.
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
from lockstep.data.inputs import Arrays, Base, Indexed, checksum
from lockstep.data.map_stage import Map, Segment
from lockstep.data.order import Move, Order, Repeat, Shuffle
from lockstep.errors import BatchError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The whole batch, across all devices."""

    size: int
    drop_last: bool


@dataclass(frozen=True)
class Prefetch:
    """So many batches ahead."""

    num: int


Step = Move | Map | Cache | Batch | Prefetch


class Chain:
    """The parts of a pipeline, worked out once."""

    def __init__(
        self, base: Base, steps: Sequence[Step], workers: int | None, identities: Mapping[int, str] | None = None
    ) -> None:
        self.base = base
        self.batch = next((step for step in steps if isinstance(step, Batch)), Batch(1, False))
        self.ahead = max((step.num for step in steps if isinstance(step, Prefetch)), default=0)
        self.seed = next((step.seed for step in reversed(steps) if isinstance(step, Shuffle)), 0)
        self.stages = _stages(base, steps, self.seed)
        self.workers = self._number_of(workers)
        cut = next((index for index, step in enumerate(steps) if isinstance(step, Batch)), len(steps))
        self.moves = [step for step in steps[:cut] if isinstance(step, Move)]
        self.batch_moves = [step for step in steps[cut:] if isinstance(step, Move)]
        self._identities = dict(identities or {})  # by depth; a pipeline that travels brings them along
        self._last_span: tuple[tuple[int, int], tuple[int, int, int]] | None = (
            None  # every shard of a batch asks for it
        )

    @cached_property
    def segments(self) -> list[Segment]:
        """The Python work."""
        return [stage for stage in self.stages if isinstance(stage, Segment)]

    @cached_property
    def travels(self) -> bool:
        """Whether each process reads its own part; else the script's own process gathers for everyone."""
        return bool(self.stages) or self.base.mapped

    @cached_property
    def examples(self) -> Order:
        """The order of examples."""
        assert self.base.num_examples is not None
        return Order(self.base.num_examples, self.moves)

    @cached_property
    def batches(self) -> Order:
        """The order of batches; those of an endless order of examples have numbers without end."""
        num = self.examples.num
        size = self.batch.size
        if num is None:
            return Order(2**62, self.batch_moves or [Repeat()])
        steps = num // size if self.batch.drop_last else -(-num // size)
        if steps == 0:
            raise BatchError(
                f"An epoch holds at least one batch. Got {num} examples for batches of {size} with drop_last=True. "
                "Use smaller batches, or drop_last=False."
            )
        return Order(steps, self.batch_moves)

    def size(self, epoch: int, batch: int) -> int:
        """The number of examples of a batch."""
        _, start, stop = self._span(epoch, batch)
        return stop - start

    def places(self, pieces: Sequence[Rows]) -> tuple[Indices, Indices]:
        """The epochs and indices of the pieces' examples, one piece after another."""
        runs: list[tuple[int, int, int]] = []  # epoch, start and stop of pieces that lie side by side
        for piece in pieces:
            epoch, first, _ = self._span(piece.epoch, piece.batch)
            start, stop = (first + place for place in piece.bounds)
            if runs and runs[-1][0] == epoch and runs[-1][2] == start:
                start = runs.pop()[1]
            runs.append((epoch, start, stop))
        found = [self.examples.places(*run) for run in runs]
        epochs, indices = (np.concatenate(parts) if len(found) > 1 else parts[0] for parts in zip(*found, strict=True))
        return epochs, indices

    def next(self, rows: Rows) -> Rows:
        """The rows of the same shard of the next batch; after the last one comes the next epoch's first."""
        last = self.batches.num is not None and rows.batch + 1 >= self.batches.num
        epoch, batch = (rows.epoch + 1, 0) if last else (rows.epoch, rows.batch + 1)
        size = self.size(epoch, batch)
        return Rows(None, epoch, batch, size, rows.shard, rows.num_shards, rows.only_inputs)

    @cached_property
    def fingerprint(self) -> int:
        """A number that tells this pipeline from others: its form, and what a few examples of its base hold."""
        maps = [
            f"{each.random} {each.batched} {getattr(each.function, '__qualname__', type(each.function).__qualname__)}"
            for segment in self.segments
            for each in segment.maps
        ]
        return checksum(repr((self.base.form, self.moves, self.batch, self.batch_moves, len(self.stages), maps)))

    def identity(self, depth: int) -> str:
        """Returns a hash of the data and code below the cache at this depth; its key stands for all that is code."""
        if depth not in self._identities:
            cache = self.stages[depth]
            assert isinstance(cache, Cache)
            below: Any
            if cache.key is None:
                work = [cache_identity.of_segment(stage) for stage in self.stages[:depth] if isinstance(stage, Segment)]
                below = cache_identity.of_base(self.base), work
            else:
                base = cache_identity.of_base(self.base) if isinstance(self.base, Arrays) else self.base.num_examples
                seeds = [stage.seed for stage in self.stages[:depth] if isinstance(stage, Segment)]
                below = base, seeds, f"key {cache.key}"
            self._identities[depth] = hashlib.sha256(repr(below).encode()).hexdigest()
        return self._identities[depth]

    def identities(self) -> dict[int, str]:
        """Returns the identity of every cache that lies in a file, by its depth."""
        files = [depth for depth, stage in enumerate(self.stages) if isinstance(stage, Cache) and stage.path]
        return {depth: self.identity(depth) for depth in files}

    def _span(self, epoch: int, batch: int) -> tuple[int, int, int]:
        """The epoch of a batch's examples, and where they start and stop in it."""
        last = self._last_span
        if last is None or last[0] != (epoch, batch):
            self._last_span = last = (epoch, batch), self._found(epoch, batch)
        return last[1]

    def _found(self, epoch: int, batch: int) -> tuple[int, int, int]:
        if self.examples.num is None:  # one endless row of examples; an epoch goes on where the last one ended
            number = batch + epoch * (self.batches.num or 0)
            return 0, number * self.batch.size, (number + 1) * self.batch.size
        epochs, numbers = self.batches.places(epoch, batch, batch + 1)
        start = int(numbers[0]) * self.batch.size
        return int(epochs[0]), start, min(start + self.batch.size, self.examples.num)

    def _number_of(self, workers: int | None) -> int:
        if not self.segments:
            return 0
        if workers == 0 and self.ahead:
            raise BatchError(
                "Python work ahead of time happens in reader processes, for a process has one set of random "
                "generators, which a thread beside a computing one may not touch. Got workers=0 with .prefetch. "
                "Write workers=1 or more, or leave .prefetch out."
            )
        return int(bool(self.ahead)) if workers is None else workers


def _stages(base: Base, steps: Sequence[Step], seed: int) -> list[Segment | Cache]:
    """Segments and caches in turn; the last segment first begins with the data set, where that is the base."""
    stages: list[Segment | Cache] = []
    dataset: Any = base.dataset if isinstance(base, Indexed) else None
    maps: list[Map] = []

    def close(cached: bool) -> None:
        nonlocal dataset
        if dataset is not None or maps:
            number = sum(isinstance(stage, Segment) for stage in stages)
            stages.append(Segment(dataset, tuple(maps), seed, number, cached))
        dataset = None
        maps.clear()

    for step in steps:
        if isinstance(step, Map):
            maps.append(step)
        elif isinstance(step, Cache):
            close(cached=True)
            stages.append(step)
    close(cached=False)
    return stages
