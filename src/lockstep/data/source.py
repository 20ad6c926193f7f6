"""Sources: the batches of an epoch, the same for any number of devices.

A source gives whole batches, or `Rows` that say which examples a batch holds. Which
example comes when is a pure function of (seed, epoch), so an epoch can be read again
from anywhere.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, Protocol

from lockstep.core import batches
from lockstep.core.arguments import check_flag
from lockstep.core.permutation import order
from lockstep.data import loaders
from lockstep.data.inputs import Stream
from lockstep.data.loaders import IterableSource
from lockstep.data.order import Repeat, Take
from lockstep.data.pipeline import Pipeline, indexed
from lockstep.data.streaming import Streaming
from lockstep.errors import BatchError

AT_ONCE = "at once"


class Source(Protocol):
    """Where batches come from."""

    num_examples: int | None
    num_steps: int | None
    batch_size: int | None
    endless: bool  # one epoch without end
    once: bool  # it can be read once: what was read is gone
    resumes: str  # how it comes to a batch in the middle of an epoch, for a person to read

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The batches of epoch `index` from batch number `start` on.

        `state` is what `state()` said when that many had been read. An endless
        source has epoch 0 alone, and `start` counts from the very beginning.
        """

    def state(self) -> Any:
        """What the loader itself says of where it stands after the last batch given out; None where it does not."""


class ArraySource:
    """Arrays in memory, gathered by index.

    >>> import numpy as np
    >>> source = ArraySource((np.arange(5), np.arange(5) * 10), batch_size=2, shuffle=False, seed=0)
    >>> [batch[1].tolist() for batch in source.epoch(0, start=1)]
    [[20, 30], [40]]
    """

    endless = once = False
    resumes = AT_ONCE

    def __init__(self, arrays: Any, batch_size: int, shuffle: bool, seed: int) -> None:
        self._arrays = arrays
        self.batch_size: int | None = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.num_examples: int | None = batches.count(arrays)
        self.num_steps: int | None = -(-self.num_examples // batch_size)

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The batches of the epoch, in the order of (seed, epoch) where shuffled."""
        assert self.num_examples is not None
        assert self.batch_size is not None
        found = order(self._seed, index, self.num_examples) if self._shuffle else None
        for first in range(start * self.batch_size, self.num_examples, self.batch_size):
            stop = min(first + self.batch_size, self.num_examples)
            yield batches.select(self._arrays, slice(first, stop) if found is None else found.between(first, stop))

    def state(self) -> Any:
        """Arrays have none."""
        return None


class PipelineSource:
    """A pipeline whose examples have an index: its batches are `Rows`.

    The rows refer to a copy of the pipeline that lives as long as the source: what was
    opened to read, and what the workers were sent, is made anew for each source. So all
    have the script's data as it is when the source is made.

    >>> from lockstep.data import arrays
    >>> import numpy as np
    >>> source = PipelineSource(arrays(np.arange(5)).batch(2))
    >>> [len(rows) for rows in source.epoch(0)]
    [2, 2, 1]
    """

    once = False
    resumes = AT_ONCE

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = replace(pipeline, base=replace(pipeline.base))
        chain = self.pipeline.chain
        self.batch_size: int | None = chain.batch.size
        self.num_steps: int | None = chain.batches.num
        self.endless = self.num_steps is None
        self.num_examples: int | None = None
        if self.num_steps is not None:
            self.num_examples = (self.num_steps - 1) * chain.batch.size + chain.size(0, self.num_steps - 1)

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """References to the epoch's batches; who computes a shard reads it."""
        chain = self.pipeline.chain
        for number in count(start) if self.num_steps is None else range(start, self.num_steps):
            yield batches.Rows(self.pipeline, index, number, chain.size(index, number))

    def state(self) -> Any:
        """A pipeline's place is a number."""
        return None


class StreamSource:
    """A pipeline over a stream: its batches are made here."""

    num_examples: int | None = None
    num_steps: int | None = None
    resumes = loaders.BY_DROPPING

    def __init__(self, pipeline: Pipeline, seed: int = 0) -> None:
        chain = pipeline.chain
        assert isinstance(chain.base, Stream)
        self.batch_size: int | None = chain.batch.size
        self.once = iter(chain.base.iterable) is chain.base.iterable
        moves = [*chain.moves, *chain.batch_moves]
        repeats = [index for index, move in enumerate(moves) if isinstance(move, Repeat)]
        self.endless = bool(repeats) and not any(isinstance(move, Take) for move in moves[repeats[0] :])
        self._streaming = Streaming(chain, seed)

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """The stream's batches."""
        return loaders.checked(self._streaming.epoch(index, start), self.once and index > 0, index)

    def state(self) -> Any:
        """A stream says nothing."""
        return None


def of(data: Any, batch_size: int, shuffle: bool, seed: int) -> Source:
    """The source for a pipeline, arrays, nests of arrays, a data set of examples, or an iterable of batches."""
    shuffle = check_flag("shuffle", shuffle, BatchError)
    if isinstance(data, Pipeline):
        pipeline = data if data.batched else data.batch(batch_size)
        return StreamSource(pipeline, seed) if isinstance(data.base, Stream) else PipelineSource(pipeline)
    if isinstance(data, dict | tuple) or batches.is_array(data):
        return ArraySource(data, batch_size, shuffle, seed)
    if _is_data_set(data) and getattr(data, "shape", None) != ():  # an array without axes holds no examples
        examples = indexed(data)
        return PipelineSource((examples.shuffle(seed) if shuffle else examples).batch(batch_size))
    own = None if getattr(data, "shape", None) == () else loaders.of(data, seed)
    if own is not None:
        return own
    raise BatchError(
        "Data is (inputs, targets), a nest of arrays, a data set, a loader or an iterable of batches. "
        f"Got {batches.describe(data)}. Give fit((x, y), ...)."
    )


def _is_data_set(data: Any) -> bool:
    """Whether it holds examples by index: what can be iterated, and cannot be asked for several, holds batches."""
    reads = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes)
    return reads and (not hasattr(data, "__iter__") or hasattr(data, "__getitems__"))


def first(source: Source, steps: int) -> list[Any]:
    """The first batches, from as many epochs as they take."""
    result: list[Any] = []
    for epoch in count():
        more = list(islice(source.epoch(epoch), steps - len(result)))
        if not more:
            raise BatchError(f"An epoch holds at least one batch. Epoch {epoch + 1} had none. Give data.")
        result += more
        if len(result) == steps:
            break
    return result


__all__ = ["ArraySource", "IterableSource", "PipelineSource", "Source", "StreamSource", "first", "of"]
