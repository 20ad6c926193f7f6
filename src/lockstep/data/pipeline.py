"""Pipelines: an input with the steps that select, order and compute its examples, as a value object.

Creating a pipeline reads no data, opens no files and starts no processes. The bytes of an example depend only on (seed,
epoch, index), not on devices, reader processes, or the batch at which a run was resumed.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.core import batches
from lockstep.core.arguments import check_flag, check_path, show
from lockstep.core.batches import Rows
from lockstep.data.cache import Cache
from lockstep.data.collate import select_example
from lockstep.data.compiled_pipeline import Batch, CompiledPipeline, Prefetch, Step
from lockstep.data.map_stage import Map
from lockstep.data.order import Repeat, Shuffle, Take
from lockstep.data.pipeline_inputs import Arrays, Indexed, Input, Stream
from lockstep.errors import BatchError

MAX_PREFETCHED = 1000  # the limit of .prefetch, because all prefetched batches are in memory at the same time


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline:
    """An input with the steps that are applied to it; `arrays`, `indexed` and `stream` create a pipeline.

    Each method returns a new pipeline with one more step. Iterating over a pipeline yields the batches of epoch 0, or
    its examples if there is no `.batch` step.

    >>> import numpy as np
    >>> numbers = arrays(np.arange(6)).shuffle(seed=1).map(lambda number: number * 10).batch(4)
    >>> list(numbers)
    [array([10, 40, 30, 20]), array([ 0, 50])]
    """

    input: Input
    steps: tuple[Step, ...] = ()
    workers: int | None = None

    def shuffle(self, seed: int = 0) -> "Pipeline":
        """Shuffles the examples; the order depends on (seed, epoch), so it is different in every epoch."""
        if isinstance(self.input, Stream):
            raise BatchError(
                "A stream has no index, so .shuffle is not supported. Use lockstep.data.indexed, or shuffle the "
                "iterable yourself."
            )
        if self.batched or self._has(Repeat):
            before = ".batch" if self.batched else ".repeat"
            raise BatchError(f".shuffle after {before} is not supported. Put .shuffle before {before}.")
        return self._with(Shuffle(_check_integer("seed", seed, None)))

    def map(self, f: Callable[..., Any], random: bool = False, workers: int | None = None) -> "Pipeline":
        """Applies `f` to every example; a tuple is passed as several arguments, `f(x, y)`.

        With `random=True` the random number generators that `f` uses (the process-wide generators of Python, numpy and
        imported frameworks, and its own) are seeded from (seed, epoch, index) for each example. After `.batch`, `f`
        gets the arrays of several examples at once, and must compute each example independently of the others.
        `workers` is the number of reader processes on the host.
        """
        if not callable(f):
            raise BatchError(f".map needs a function, not {show(f)}. Use for example .map(lambda x, y: (2 * x, y)).")
        if check_flag("random", random, BatchError) and self.batched:
            raise BatchError(
                ".map(f, random=True) after .batch is not supported, because random numbers are seeded for each "
                "example. Put this .map before .batch."
            )
        return self._with(Map(f, random, self.batched), workers)

    def batch(self, n: int, drop_last: bool = False) -> "Pipeline":
        """Groups examples into batches of `n` examples, counted over all devices.

        The last batch of an epoch may be smaller; `drop_last=True` leaves it out.
        """
        if self.batched:
            raise BatchError(f".batch({n}) after .batch is not supported. Leave one of the two out.")
        return self._with(Batch(_check_integer("batch", n, 1), check_flag("drop_last", drop_last, BatchError)))

    def cache(self, path: str | os.PathLike[str] | None = None, key: str | None = None) -> "Pipeline":
        """Stores each example of epoch 0 in memory, or in the file `path`, which later runs read.

        The file is computed again if the data or the code before this step has changed: arrays, functions, and the
        objects, modules and global names that these use. An object that cannot be compared raises BatchError. With
        `key` the data set and the functions are not compared; change the key after every change of them. Files that
        your code opens are never compared, so put their version into the key.
        """
        if key is not None and (path is None or not isinstance(key, str)):
            raise BatchError(
                f"The key of a cache must be a string and needs a path. Got .cache({path!r}, key={key!r}). Use "
                '.cache(), .cache(path), or .cache(path, key="1").'
            )
        if isinstance(self.input, Stream):
            raise BatchError("A stream has no length, so it cannot be cached. Use lockstep.data.indexed.")
        checked_path = None if path is None else check_path("path", path, BatchError, "examples.cache")
        return self._with(Cache(checked_path, key))

    def prefetch(self, n: int) -> "Pipeline":
        """Prepares the next `n` batches while the devices compute."""
        return self._with(Prefetch(_check_integer("prefetch", n, 1, MAX_PREFETCHED)))

    def repeat(self) -> "Pipeline":
        """Appends all following epochs to an epoch, so that the epoch is infinite."""
        if self._has(Repeat):
            raise BatchError(
                ".repeat twice is not supported, because one .repeat already repeats without end. Leave one of the "
                "two out."
            )
        return self._with(Repeat())

    def take(self, n: int) -> "Pipeline":
        """Takes the first `n` examples of an epoch, or, after `.batch`, the first `n` batches."""
        return self._with(Take(_check_integer("take", n, 1)))

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches or examples of epoch 0, as numpy."""
        return _iterate(self)

    def __repr__(self) -> str:
        """Returns the names of the input and the steps."""
        names = [type(self.input).__name__.lower(), *(type(step).__name__.lower() for step in self.steps)]
        return f"<lockstep.data {'.'.join(names)}>"

    @property
    def batched(self) -> bool:
        """Whether the pipeline has a `.batch` step."""
        return self._has(Batch)

    @cached_property
    def compiled(self) -> CompiledPipeline:
        """The pipeline split into moves and stages."""
        return CompiledPipeline(self.input, self.steps, self.workers, vars(self).get("identities"))

    @property
    def fingerprint(self) -> int:
        """A checksum of the pipeline's structure and a few of its examples."""
        return self.compiled.fingerprint

    def _has(self, kind: type[Step]) -> bool:
        return any(isinstance(step, kind) for step in self.steps)

    def _with(self, step: Step, workers: int | None = None) -> "Pipeline":
        if workers is not None:
            workers = max(_check_integer("workers", workers, 0), self.workers or 0)
        return replace(self, steps=(*self.steps, step), workers=self.workers if workers is None else workers)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields and the caches' identities, because other processes cannot hash the script's code."""
        identities = self.compiled.compute_identities()
        return {"input": self.input, "steps": self.steps, "workers": self.workers, "identities": identities}


def arrays(*pytree: Any) -> Pipeline:
    """Returns a pipeline over a pytree of arrays; `arrays(x, y)` is the same as `arrays((x, y))`.

    An array may be an array of numpy or a framework, a mapped file, or the path of a `.npy` file, which is then mapped.

    >>> import numpy as np
    >>> next(iter(arrays(np.zeros((5, 2)), np.arange(5)).batch(2)))
    (array([[0., 0.],
           [0., 0.]]), array([0, 1]))
    """
    if not pytree:
        raise BatchError("lockstep.data.arrays() needs at least one array. Write lockstep.data.arrays(x, y).")

    def make_absolute(value: Any) -> Any:
        return Path(os.path.abspath(value)) if isinstance(value, str | os.PathLike) else value

    return Pipeline(Arrays(batches.transform(pytree[0] if len(pytree) == 1 else pytree, make_absolute)))


def indexed(dataset: Any, workers: int | None = None) -> Pipeline:
    """Returns a pipeline over an object with `__len__` and `__getitem__`; uses its `__getitems__` if there is one.

    >>> list(indexed(["a", "b", "c"]).batch(2))
    [['a', 'b'], ['c']]
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise BatchError(
            f"lockstep.data.indexed needs an object with __len__ and __getitem__, but {type(dataset).__name__} does "
            "not have both methods. Define both, or use lockstep.data.stream for examples without an index."
        )
    return Pipeline(Indexed(dataset), workers=None if workers is None else _check_integer("workers", workers, 0))


def stream(iterable: Iterable[Any]) -> Pipeline:
    """Returns a pipeline over an iterable of examples, which is read in the script's process.

    >>> list(stream(range(5)).map(lambda number: number + 1).batch(2))
    [array([1, 2]), array([3, 4]), array([5])]
    """
    if not isinstance(iterable, Iterable) or getattr(iterable, "shape", None) == ():
        raise BatchError(
            f"lockstep.data.stream needs an iterable. Got {show(iterable)}. Use a list, a generator, or an object with "
            "__iter__."
        )
    return Pipeline(Stream(iterable))


def _check_integer(name: str, value: Any, least: int | None, most: int | None = None) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least) or (most is not None and value > most):
        bounds = "" if least is None else f", {least} or more" if most is None else f" from {least} to {most}"
        raise BatchError(
            f"{name}={show(value)} must be an integer{bounds}. Use for example {name}={max(least or 0, 1)}."
        )
    number: int = value
    return number


def _iterate(pipeline: Pipeline) -> Iterator[Any]:
    """Yields the first epoch's batches, or its examples if the pipeline has no `.batch`, for `iter(pipeline)`.

    Ends the threads and processes that read them, also if the iteration is not finished.
    """
    # Imported here, because these modules start processes, and creating a pipeline should not need them.
    from lockstep.data.reader import PipelineReader
    from lockstep.data.streaming import StreamReader

    compiled = pipeline.compiled
    with closing(StreamReader(compiled) if isinstance(pipeline.input, Stream) else PipelineReader(compiled)) as reader:
        if isinstance(reader, StreamReader):
            batches_read = reader.epoch(0, 0)
        else:
            numbers = count() if compiled.batches.num is None else range(compiled.batches.num)
            rows = (Rows(None, 0, number, compiled.count_examples(0, number)) for number in numbers)
            batches_read = (reader.read([each])[0] for each in rows)
        for batch in batches_read:
            yield batch if pipeline.batched else select_example(batch, 0)
