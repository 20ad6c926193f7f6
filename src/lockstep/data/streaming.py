"""Streaming: the batches of a stream, made in the script's own process.

A stream has no index to read by, so its examples are taken one after another by the
thread that asks for the batches; what is built on it may run in reader processes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np

from lockstep.core import seeds
from lockstep.core.global_rng import Apart
from lockstep.core.held_rng import find_generators, read_apart, seed_generators
from lockstep.data.collate import stack
from lockstep.data.compiled_pipeline import Chain
from lockstep.data.inputs import Stream
from lockstep.data.order import Move, Order, Repeat, Take
from lockstep.data.reader import Reader
from lockstep.errors import BatchError

Example = tuple[int, int, Any]  # epoch, index, and the example itself
Read = Callable[[int], Iterator[Any]]  # what an epoch holds


class Streaming:
    """A stream and the reader that works on its examples."""

    def __init__(self, chain: Chain, seed: int = 0) -> None:
        self._chain = chain
        self._seed = seed
        self._reader = Reader(chain)
        self._groups = _groups(chain)

    def epoch(self, index: int, start: int) -> Iterator[Any]:
        """The batches of an epoch; those before `start` are read and dropped.

        What the stream draws follows from (seed, epoch), so a resumed epoch has the same examples.
        """
        assert isinstance(self._chain.base, Stream)
        seed = seeds.derive("stream", self._seed, index)
        seed_generators(find_generators(self._chain.base.iterable), seed)
        groups = islice(read_apart(lambda: self._groups(index), Apart(seed)), start, None)
        if not self._reader.threaded:
            yield from map(self._batch, groups)
            return
        ahead = deque(self._reader.submit(self._batch, group) for group in islice(groups, 1 + self._chain.ahead))
        while ahead:
            batch = ahead.popleft().result()
            ahead.extend(self._reader.submit(self._batch, group) for group in islice(groups, 1))
            yield batch

    def close(self) -> None:
        """Ends threads and reader processes."""
        self._reader.close()

    def _batch(self, group: list[Example]) -> Any:
        epochs, indices = (np.array([each[place] for each in group]) for place in (0, 1))
        examples = [each[2] for each in group]
        return self._reader.run(0, examples, indices, epochs) if self._chain.segments else stack(examples)


def _groups(chain: Chain) -> Read:
    """The examples of each batch of an epoch, as the chain's moves have it."""
    base, size, drop_last = chain.base, chain.batch.size, chain.batch.drop_last
    assert isinstance(base, Stream)
    taken = [Take(move.num * size) for move in chain.batch_moves if isinstance(move, Take)]
    order = Order(base.least, [*chain.moves, *taken])

    def examples(epoch: int) -> Iterator[Example]:
        return ((epoch, index, example) for index, example in enumerate(base.iterable))

    moved = _moved(examples, chain.moves, order.rounds)

    def batches(epoch: int) -> Iterator[list[Example]]:
        found = moved(epoch)
        while group := list(islice(found, size)):
            if len(group) == size or not drop_last:
                yield group

    steps = (order.num or 1) // size if drop_last else -(-(order.num or 1) // size)
    return _moved(batches, chain.batch_moves, Order(max(1, steps), chain.batch_moves).rounds)


def _moved(read: Read, moves: Sequence[Move], rounds: int) -> Read:
    """`read`, taken and repeated; an epoch that repeats has so many rounds, each an epoch of what lies below."""
    for move in moves:
        if isinstance(move, Take):
            read = _taken(read, move.num)
        elif isinstance(move, Repeat):
            read = _repeated(read, rounds)
    return read


def _taken(read: Read, num: int) -> Read:
    return lambda epoch: islice(read(epoch), num)


def _repeated(read: Read, rounds: int) -> Read:
    def found(epoch: int) -> Iterator[Any]:
        for number in count(epoch * rounds):
            empty = True
            for each in read(number):
                empty = False
                yield each
            if empty:
                raise BatchError(
                    f"A stream that is repeated can be read again. This one had nothing in round {number + 1}: a "
                    "generator can be read once. Give a list, or an object whose __iter__ begins anew."
                )

    return found
