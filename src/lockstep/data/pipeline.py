"""Pipelines: where examples come from and what becomes of them, as a value.

Building one reads nothing, opens nothing and starts nothing. Which bytes it has for
an example follows from (seed, epoch, index): not from devices, from reader
processes, or from where a run was resumed.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.core import batches
from lockstep.core.arguments import check_flag, check_path, show
from lockstep.data.cache import Cache
from lockstep.data.compiled_pipeline import Batch, Chain, Prefetch, Step
from lockstep.data.inputs import Arrays, Base, Indexed, Stream
from lockstep.data.map_stage import Map
from lockstep.data.order import Repeat, Shuffle, Take
from lockstep.errors import BatchError

MAX_AHEAD = 1000  # batches, all of which are begun at once and held


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline:
    """A base and the steps built on it. Made by `arrays`, `indexed` and `stream`; every method gives a new one.

    Iterating gives the batches of epoch 0, or its examples where there is no `.batch`.

    >>> import numpy as np
    >>> numbers = arrays(np.arange(6)).shuffle(seed=1).map(lambda number: number * 10).batch(4)
    >>> list(numbers)
    [array([10, 40, 30, 20]), array([ 0, 50])]
    """

    base: Base
    steps: tuple[Step, ...] = ()
    workers: int | None = None

    def shuffle(self, seed: int = 0) -> "Pipeline":
        """Another order in every epoch, which follows from (seed, epoch)."""
        if isinstance(self.base, Stream):
            raise BatchError("Examples are shuffled by index. A stream has none. Use lockstep.data.indexed.")
        if self.batched or self._has(Repeat):
            before = ".batch" if self.batched else ".repeat"
            raise BatchError(f"Examples are shuffled, epoch by epoch. Got .shuffle after {before}. Write it before.")
        return self._with(Shuffle(_whole("seed", seed, None)))

    def map(self, f: Callable[..., Any], random: bool = False, workers: int | None = None) -> "Pipeline":
        """`f` of every example; a tuple is spread, `f(x, y)`.

        With `random=True` Python's, numpy's and torch's global generators are seeded
        for each example from (seed, epoch, index). After `.batch`, `f` gets arrays of
        several examples at once and must treat each by itself. `workers` is the number
        of reader processes of the host.
        """
        if not callable(f):
            raise BatchError(f".map takes a function. Got {show(f)}. Use for example .map(lambda x, y: (2 * x, y)).")
        if check_flag("random", random, BatchError) and self.batched:
            raise BatchError(
                "What is drawn for an example follows from its index, so it is drawn one by one. "
                "Got .map(f, random=True) after .batch. Write it before .batch."
            )
        return self._with(Map(f, random, self.batched), workers)

    def batch(self, n: int, drop_last: bool = False) -> "Pipeline":
        """Batches of `n` examples, across all devices; the last one may be short."""
        if self.batched:
            raise BatchError(f"A pipeline is batched once. Got .batch({n}) after .batch. Leave one out.")
        return self._with(Batch(_whole("batch", n, 1), check_flag("drop_last", drop_last, BatchError)))

    def cache(self, path: str | os.PathLike[str] | None = None, key: str | None = None) -> "Pipeline":
        """Keeps each example as epoch 0 has it, in memory or in a file, where a later run finds it.

        The file is made anew if the data or the code below it has changed: arrays, functions, the objects, modules and
        global names that these use. What cannot be compared raises. With `key` the data set and functions are not
        looked at: the file belongs to the key, and you give another one after every change. Files that your code opens
        are never compared, so put their version into the key.
        """
        if key is not None and (path is None or not isinstance(key, str)):
            raise BatchError(
                f"A key is a string that names what lies in a file. Got .cache({path!r}, key={key!r}). "
                'Use .cache(path, key="1").'
            )
        if isinstance(self.base, Stream):
            raise BatchError("A cache has a row for every example. A stream has no length. Use lockstep.data.indexed.")
        place = None if path is None else check_path("path", path, BatchError, "examples.cache")
        return self._with(Cache(place, key))

    def prefetch(self, n: int) -> "Pipeline":
        """Prepares the next `n` batches while the devices compute."""
        return self._with(Prefetch(_whole("prefetch", n, 1, MAX_AHEAD)))

    def repeat(self) -> "Pipeline":
        """Epoch after epoch without end."""
        if self._has(Repeat):
            raise BatchError("A pipeline is repeated once, without end. Got .repeat twice. Leave one out.")
        return self._with(Repeat())

    def take(self, n: int) -> "Pipeline":
        """The first `n` examples of an epoch, or after `.batch` its first `n` batches."""
        return self._with(Take(_whole("take", n, 1)))

    def __iter__(self) -> Iterator[Any]:
        """Epoch 0, as numpy."""
        from lockstep.data.iteration import iterate

        return iterate(self)

    def __repr__(self) -> str:
        """The chain in a few words."""
        names = [type(self.base).__name__.lower(), *(type(step).__name__.lower() for step in self.steps)]
        return f"<lockstep.data {'.'.join(names)}>"

    @property
    def batched(self) -> bool:
        """Whether it gives batches."""
        return self._has(Batch)

    @cached_property
    def chain(self) -> Chain:
        """The pipeline taken apart."""
        return Chain(self.base, self.steps, self.workers, vars(self).get("identities"))

    @property
    def fingerprint(self) -> int:
        """A number that tells this pipeline from others."""
        return self.chain.fingerprint

    def _has(self, kind: type[Step]) -> bool:
        return any(isinstance(step, kind) for step in self.steps)

    def _with(self, step: Step, workers: int | None = None) -> "Pipeline":
        if workers is not None:
            workers = max(_whole("workers", workers, 0), self.workers or 0)
        return replace(self, steps=(*self.steps, step), workers=self.workers if workers is None else workers)

    def __getstate__(self) -> dict[str, Any]:
        """The value, without what was computed from it; but code is only compared where the script itself runs."""
        identities = self.chain.identities()
        return {"base": self.base, "steps": self.steps, "workers": self.workers, "identities": identities}


def arrays(*nest: Any) -> Pipeline:
    """Examples in arrays: numpy's, mapped files, paths of `.npy` files (which are mapped), or nests of these.

    Several arguments are a tuple, `arrays(x, y)`; one is taken as it is.

    >>> import numpy as np
    >>> next(iter(arrays(np.zeros((5, 2)), np.arange(5)).batch(2)))
    (array([[0., 0.],
           [0., 0.]]), array([0, 1]))
    """
    if not nest:
        raise BatchError("A pipeline begins with arrays. Got none. Write lockstep.data.arrays(x, y).")

    def leaf(value: Any) -> Any:
        return Path(os.path.abspath(value)) if isinstance(value, str | os.PathLike) else value

    return Pipeline(Arrays(batches.transform(nest[0] if len(nest) == 1 else nest, leaf)))


def indexed(dataset: Any, workers: int | None = None) -> Pipeline:
    """Examples of anything with `__len__` and `__getitem__`; `__getitems__` is used where there is one.

    >>> list(indexed(["a", "b", "c"]).batch(2))
    [['a', 'b'], ['c']]
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise BatchError(
            f"A data set has __len__ and __getitem__. Got {type(dataset).__name__}. "
            "Write them, or use lockstep.data.stream for examples without an index."
        )
    return Pipeline(Indexed(dataset), workers=None if workers is None else _whole("workers", workers, 0))


def stream(iterable: Iterable[Any]) -> Pipeline:
    """Examples one after another, read in the script's own process.

    >>> list(stream(range(5)).map(lambda number: number + 1).batch(2))
    [array([1, 2]), array([3, 4]), array([5])]
    """
    if not isinstance(iterable, Iterable) or getattr(iterable, "shape", None) == ():
        raise BatchError(f"A stream is iterable. Got {show(iterable)}. Give a generator, or an object with __iter__.")
    return Pipeline(Stream(iterable))


def _whole(name: str, value: Any, least: int | None, most: int | None = None) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or (least is not None and value < least) or (most is not None and value > most):
        rule = (
            "a whole number"
            if least is None
            else f"a whole number from {least} {'on' if most is None else f'to {most}'}"
        )
        raise BatchError(f"{name} takes {rule}. Got {show(value)}. Use for example {name}={max(least or 0, 1)}.")
    number: int = value
    return number
