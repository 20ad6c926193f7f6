"""Sources: the batches of every epoch, which are the same for any number of devices.

A source yields whole batches, or `Rows` that refer to the examples of a batch. The order of the examples is a pure
function of (seed, epoch), so an epoch can be read again from any batch.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any, Protocol

from lockstep.core import batches
from lockstep.core.arguments import check_flag
from lockstep.core.permutation import order
from lockstep.data import loaders
from lockstep.data.loaders import IterableSource
from lockstep.data.order import Repeat, Take
from lockstep.data.pipeline import Pipeline, indexed
from lockstep.data.pipeline_inputs import Stream
from lockstep.data.streaming import StreamReader
from lockstep.errors import BatchError

AT_ONCE = "at once"


class Source(Protocol):
    """Protocol of an object that yields the batches of every epoch."""

    num_examples: int | None
    num_steps: int | None
    batch_size: int | None
    endless: bool  # whether the source has one infinite epoch
    once: bool  # whether the source can be read only once, as a generator
    resumes: str  # a text for the user: how a resumed run gets to a batch in the middle of an epoch

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of epoch `index` from batch number `start` on.

        `state` is what `state()` returned after `start` batches had been read. An infinite source has only epoch 0,
        and `start` is counted from its first batch.
        """

    def state(self) -> Any:
        """Returns the state of the loader after the last batch that was yielded; None if the source has no state."""


class ArraySource:
    """A source of batches that are gathered by index from arrays in memory.

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
        """Yields the batches of the epoch; with shuffling, their order depends on (seed, epoch)."""
        assert self.num_examples is not None
        assert self.batch_size is not None
        permutation = order(self._seed, index, self.num_examples) if self._shuffle else None
        for first in range(start * self.batch_size, self.num_examples, self.batch_size):
            stop = min(first + self.batch_size, self.num_examples)
            selection = slice(first, stop) if permutation is None else permutation.between(first, stop)
            yield batches.select(self._arrays, selection)

    def state(self) -> Any:
        """Returns None, because arrays have no state."""
        return None


class PipelineSource:
    """A source that yields the batches of a pipeline as `Rows`; the pipeline's examples must have an index.

    Each source has its own copy of the pipeline, to which its rows refer, and the readers of this copy are closed with
    the source. So a source reads the script's data as it is when the source is created.

    >>> from lockstep.data import arrays
    >>> import numpy as np
    >>> source = PipelineSource(arrays(np.arange(5)).batch(2))
    >>> [len(rows) for rows in source.epoch(0)]
    [2, 2, 1]
    """

    once = False
    resumes = AT_ONCE

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = replace(pipeline, input=replace(pipeline.input))
        compiled = self.pipeline.compiled
        self.batch_size: int | None = compiled.batch.size
        self.num_steps: int | None = compiled.batches.num
        self.endless = self.num_steps is None
        self.num_examples: int | None = None
        if self.num_steps is not None:
            self.num_examples = (self.num_steps - 1) * compiled.batch.size + compiled.count_examples(
                0, self.num_steps - 1
            )

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields references to the epoch's batches; each process reads the examples of its own shards."""
        compiled = self.pipeline.compiled
        for number in count(start) if self.num_steps is None else range(start, self.num_steps):
            yield batches.Rows(self.pipeline, index, number, compiled.count_examples(index, number))

    def state(self) -> Any:
        """Returns None, because the number of a batch is enough to continue after it."""
        return None


class StreamSource:
    """A source of the batches of a pipeline over a stream, which is read in this process."""

    num_examples: int | None = None
    num_steps: int | None = None
    resumes = loaders.BY_DROPPING

    def __init__(self, pipeline: Pipeline, seed: int = 0) -> None:
        compiled = pipeline.compiled
        assert isinstance(compiled.input, Stream)
        self.batch_size: int | None = compiled.batch.size
        self.once = iter(compiled.input.iterable) is compiled.input.iterable
        moves = [*compiled.moves, *compiled.batch_moves]
        repeats = [index for index, move in enumerate(moves) if isinstance(move, Repeat)]
        self.endless = bool(repeats) and not any(isinstance(move, Take) for move in moves[repeats[0] :])
        self._reader = StreamReader(compiled, seed)

    def epoch(self, index: int, start: int = 0, state: Any = None) -> Iterator[Any]:
        """Yields the batches of the stream from batch `start` on."""
        return loaders.check_not_empty(self._reader.epoch(index, start), self.once and index > 0, index)

    def state(self) -> Any:
        """Returns None, because a stream has no state."""
        return None


def open_source(data: Any, batch_size: int, shuffle: bool, seed: int) -> Source:
    """Returns the source for a pipeline, a pytree of arrays, a data set of examples, or an iterable of batches."""
    shuffle = check_flag("shuffle", shuffle, BatchError)
    if isinstance(data, Pipeline):
        pipeline = data if data.batched else data.batch(batch_size)
        return StreamSource(pipeline, seed) if isinstance(data.input, Stream) else PipelineSource(pipeline)
    reads_examples = hasattr(data, "__getitems__")  # Hugging Face's data sets have a shape, too
    if isinstance(data, dict | tuple) or (batches.is_array(data) and not reads_examples):
        return ArraySource(data, batch_size, shuffle, seed)
    if _is_data_set(data) and getattr(data, "shape", None) != ():  # an array without axes has no examples
        examples = indexed(data)
        return PipelineSource((examples.shuffle(seed) if shuffle else examples).batch(batch_size))
    source = None if getattr(data, "shape", None) == () else loaders.open_loader(data, seed)
    if source is not None:
        return source
    raise BatchError(
        "Data must be (inputs, targets), a pytree of arrays, a data set, a loader or an iterable of batches. Got "
        f"{batches.describe(data)}. Use for example fit((x, y), ...)."
    )


def _is_data_set(data: Any) -> bool:
    """Returns whether `data` has examples by index. An iterable without `__getitems__` is assumed to have batches."""
    has_index = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes)
    return has_index and (not hasattr(data, "__iter__") or hasattr(data, "__getitems__"))


def read_batches(source: Source, steps: int) -> list[Any]:
    """Returns the first `steps` batches, from as many epochs as needed."""
    result: list[Any] = []
    for epoch in count():
        more = list(islice(source.epoch(epoch), steps - len(result)))
        if not more:
            raise BatchError(
                f"Epoch {epoch + 1} of the data has no batch. Use data with at least one example in every epoch."
            )
        result += more
        if len(result) == steps:
            break
    return result


__all__ = ["ArraySource", "IterableSource", "PipelineSource", "Source", "StreamSource", "open_source", "read_batches"]
