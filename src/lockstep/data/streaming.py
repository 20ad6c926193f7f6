"""Reads the batches of a pipeline over a stream, which is an iterable without an index, in the script's process.

The thread that asks for the batches reads the examples one after another; map stages may run in reader processes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np

from lockstep.core import seeds
from lockstep.core.find_rng import find_generators
from lockstep.core.global_rng import SeparateGenerators
from lockstep.core.local_rng import iterate_separately, seed_generators
from lockstep.data.collate import stack
from lockstep.data.compiled_pipeline import CompiledPipeline
from lockstep.data.order import Move, Order, Repeat, Take
from lockstep.data.pipeline_inputs import Stream
from lockstep.data.reader import PipelineReader
from lockstep.errors import BatchError

Example = tuple[int, int, Any]  # epoch, index, and the example itself
ReadEpoch = Callable[[int], Iterator[Any]]  # returns the items of an epoch


class StreamReader:
    """Reads the batches of a pipeline over a stream."""

    def __init__(self, pipeline: CompiledPipeline, seed: int = 0) -> None:
        self._pipeline = pipeline
        self._seed = seed
        self._reader = PipelineReader(pipeline)
        self._read_groups = _build_groups(pipeline)

    def epoch(self, index: int, start: int) -> Iterator[Any]:
        """Yields the batches of an epoch from batch `start` on; reads and drops the batches before it.

        The random numbers that the stream draws depend on (seed, epoch), so a resumed epoch has the same examples.
        """
        assert isinstance(self._pipeline.input, Stream)
        seed = seeds.derive("stream", self._seed, index)
        seed_generators(find_generators(self._pipeline.input.iterable), seed)
        groups = islice(
            iterate_separately(lambda: self._read_groups(index), SeparateGenerators(seed)),
            start,
            None,
        )
        if not self._reader.has_threads:
            yield from map(self._compute_batch, groups)
            return
        num_ahead = 1 + self._pipeline.num_prefetched
        futures = deque(self._reader.submit(self._compute_batch, group) for group in islice(groups, num_ahead))
        while futures:
            batch = futures.popleft().result()
            futures.extend(self._reader.submit(self._compute_batch, group) for group in islice(groups, 1))
            yield batch

    def close(self) -> None:
        """Ends threads and reader processes."""
        self._reader.close()

    def _compute_batch(self, group: list[Example]) -> Any:
        epochs, indices = (np.array([each[position] for each in group]) for position in (0, 1))
        examples = [each[2] for each in group]
        return self._reader.run(0, examples, indices, epochs) if self._pipeline.map_stages else stack(examples)


def _build_groups(pipeline: CompiledPipeline) -> ReadEpoch:
    """Returns a function that reads an epoch's examples, grouped by batch, after all moves of the pipeline."""
    stream, size, drop_last = pipeline.input, pipeline.batch.size, pipeline.batch.drop_last
    assert isinstance(stream, Stream)
    takes = [Take(move.num * size) for move in pipeline.batch_moves if isinstance(move, Take)]
    order = Order(stream.min_examples, [*pipeline.moves, *takes])

    def read_examples(epoch: int) -> Iterator[Example]:
        return ((epoch, index, example) for index, example in enumerate(stream.iterable))

    read_moved = _apply_moves(read_examples, pipeline.moves, order.rounds)

    def read_batches(epoch: int) -> Iterator[list[Example]]:
        examples = read_moved(epoch)
        while group := list(islice(examples, size)):
            if len(group) == size or not drop_last:
                yield group

    steps = (order.num or 1) // size if drop_last else -(-(order.num or 1) // size)
    return _apply_moves(read_batches, pipeline.batch_moves, Order(max(1, steps), pipeline.batch_moves).rounds)


def _apply_moves(read: ReadEpoch, moves: Sequence[Move], rounds: int) -> ReadEpoch:
    """Returns `read` with takes and repeats applied. A repeated epoch consists of `rounds` epochs of `read`."""
    for move in moves:
        if isinstance(move, Take):
            read = _take(read, move.num)
        elif isinstance(move, Repeat):
            read = _repeat(read, rounds)
    return read


def _take(read: ReadEpoch, num: int) -> ReadEpoch:
    return lambda epoch: islice(read(epoch), num)


def _repeat(read: ReadEpoch, rounds: int) -> ReadEpoch:
    def read_repeated(epoch: int) -> Iterator[Any]:
        for number in count(epoch * rounds):
            is_empty = True
            for each in read(number):
                is_empty = False
                yield each
            if is_empty and number == 0:
                raise BatchError(
                    "The stream before .repeat gives no examples, or fewer than one full batch of .batch(..., "
                    "drop_last=True). Use a non-empty iterable, not a generator that was read before; or "
                    "drop_last=False."
                )
            if is_empty:
                raise BatchError(
                    f"The stream before .repeat gives no examples in repetition {number + 1}; a generator, for "
                    "example, can be read only once. Use a list, or an object whose __iter__ starts from the first "
                    "example."
                )

    return read_repeated
