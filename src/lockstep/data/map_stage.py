"""A segment: Python work of the script's own, from a base or a cache up to the next cache.

What it gives for an example follows from (seed, epoch, index) alone. Where it may
draw, the process's generators are seeded from these for each example, and put back.
It runs in place or in a reader process, and gives the same bytes in both.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches, seeds
from lockstep.core.held_rng import IsolatedGenerators
from lockstep.data.collate import copied, join, plain, row, stack
from lockstep.errors import BatchError, ExactError, ExampleError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Map:
    """A function of one example, or of the arrays of several."""

    function: Callable[..., Any]
    random: bool
    batched: bool

    def __call__(self, example: Any) -> Any:
        """A tuple is spread."""
        return self.function(*example) if isinstance(example, tuple) else self.function(example)


@dataclass(frozen=True, eq=False)
class Segment:
    """Reads examples of a data set, where it begins with one, and runs maps over them."""

    dataset: Any  # None: it works on what lies below
    maps: tuple[Map, ...]
    seed: int
    number: int  # of this segment in its pipeline
    cached: bool  # whether a cache keeps what it gives: then no example may feel its neighbours

    @property
    def random(self) -> bool:
        """Whether it may draw from the process's generators."""
        return self.dataset is not None or any(each.random for each in self.maps)

    def run(self, below: Any, indices: Indices, epochs: Indices) -> Any:
        """The batch of these examples; `below` is the batch that lies below, or a list of examples."""
        if "torch" in sys.modules:
            return self._run(below, indices, epochs)
        result = self._run(copied(below), indices, epochs)  # a function may write to what it gets
        # Where the script's own code was the first to import torch, its generator was not seeded: all of it again.
        return self._run(below, indices, epochs) if "torch" in sys.modules else result

    def _run(self, below: Any, indices: Indices, epochs: Indices) -> Any:
        groups = [[place] for place in range(len(indices))] if self.cached else [list(range(len(indices)))]
        functions = [each.function for each in self.maps]
        with _alone(), IsolatedGenerators(self.dataset, *functions) as isolated:
            parts = []
            for group in groups:
                examples = self._examples(below, indices, epochs, group, isolated)
                parts.append(self._batched(examples, indices[group], isolated))
            if not self.random and isolated.has_moved():
                raise _drawn(indices)
        return parts[0] if len(parts) == 1 else join(parts)

    def _examples(
        self, below: Any, indices: Indices, epochs: Indices, group: list[int], isolated: IsolatedGenerators
    ) -> Any:
        """The batch after every map of one example."""
        single = [each for each in self.maps if not each.batched]
        if self.dataset is None and not single and not isinstance(below, list):
            return below
        read = self._together(indices, epochs, group, isolated) if hasattr(self.dataset, "__getitems__") else None
        examples = []
        for place in group:
            self._seed(isolated, int(epochs[place]), [int(indices[place])], 0 if read is None else 1)
            with _explained(indices[[place]]):
                if read is not None:
                    example = read[place - group[0]]
                elif self.dataset is not None:
                    example = self.dataset[int(indices[place])]
                else:
                    example = row(below, place)
                for each in single:
                    example = each(example)
            examples.append(example)
        return stack(examples)

    def _together(self, indices: Indices, epochs: Indices, group: list[int], isolated: IsolatedGenerators) -> list[Any]:
        """The data set's own way to read several at once; what it draws follows from all of them."""
        wanted = [int(index) for index in indices[group]]
        self._seed(isolated, int(epochs[group[0]]), wanted, 0)
        with _explained(indices[group]):
            found = list(self.dataset.__getitems__(wanted))
        if len(found) != len(wanted):
            raise BatchError(f"__getitems__ gives an example for every index. Got {len(found)} for {len(wanted)}.")
        return found

    def _batched(self, batch: Any, indices: Indices, isolated: IsolatedGenerators) -> Any:
        for each in self.maps:
            if each.batched:
                before = isolated.states()
                with _explained(indices):
                    batch = batches.transform(batches.top(each(batch)), plain)
                if isolated.has_moved(before):
                    raise _drawn(indices)
                if batches.count(batch) != len(indices):
                    raise BatchError(
                        "A function after .batch gives back as many examples as it got. "
                        f"Got {batches.describe(batch)} for {len(indices)}."
                    )
        return batch

    def _seed(self, isolated: IsolatedGenerators, epoch: int, indices: list[int], stage: int) -> None:
        if self.random:
            # Work above a cache, or after the data set has read several, draws from elsewhere.
            later = [self.number, stage] if self.number or stage else []
            isolated.seed(seeds.derive("example", self.seed, epoch, *indices, *later))


def _drawn(indices: Indices) -> ExactError:
    return ExactError(
        "What is drawn for an example must follow from the seed. A function given to .map drew random numbers for one "
        f"of the {_named(indices)}, from a generator of the whole process, one that it holds, or a new one without a "
        "seed. Write .map(f, random=True) before .batch: then all of these are seeded for each example."
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Torch on one thread, as in a reader process: the number of threads can change bits."""
    torch = sys.modules.get("torch")
    threads = 1 if torch is None else torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)  # type: ignore[union-attr]
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)  # type: ignore[union-attr]


@contextmanager
def _explained(indices: Indices) -> Iterator[None]:
    """Says which examples the script's own code failed on."""
    try:
        yield
    except Exception as error:
        raise ExampleError(
            f"The script's own code failed on {_named(indices)}: {type(error).__name__}: {error}. "
            "Mend the data set or the function given to .map."
        ) from error


def _named(indices: Indices) -> str:
    """The examples in a few words, for errors."""
    if len(indices) == 1:
        return f"example {indices[0]}"
    shown = ", ".join(str(index) for index in indices[:4])
    return f"examples {shown}" + (f" … {indices[-1]} ({len(indices)} in all)" if len(indices) > 4 else "")
