"""A map stage: the data set and the functions given to `.map`, up to the next cache.

The result of a stage for an example depends only on (seed, epoch, index). If the code may draw random numbers, all its
random number generators are seeded from these for each example, and restored afterwards. A stage gives the same bytes
in this process and in a reader process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core import batches, framework_hooks, seeds
from lockstep.core.local_rng import IsolatedGenerators
from lockstep.data.collate import concatenate, copy_arrays, select_example, stack, to_numpy
from lockstep.errors import BatchError, ExactError, ExampleError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Map:
    """The `.map` step of a pipeline: a function of one example, or of the arrays of several examples if `batched`."""

    function: Callable[..., Any]
    random: bool
    batched: bool

    def __call__(self, example: Any) -> Any:
        """Returns the function's result for an example; a tuple is passed as several arguments."""
        return self.function(*example) if isinstance(example, tuple) else self.function(example)


@dataclass(frozen=True, eq=False)
class MapStage:
    """Applies functions to examples, which it reads from a data set or gets from the previous stage."""

    dataset: Any  # None if the stage gets the examples from the previous stage
    maps: tuple[Map, ...]
    seed: int
    number: int  # the index of this stage among the map stages of its pipeline
    is_cached: bool  # whether a cache follows, so that no example may depend on others computed at the same time

    @property
    def random(self) -> bool:
        """Whether the stage's code may draw random numbers."""
        return self.dataset is not None or any(each.random for each in self.maps)

    def run(self, below: Any, indices: Indices, epochs: Indices) -> Any:
        """Returns the batch of the examples with these indices in these epochs, after the stage's functions.

        `below` is the batch, or list, of these examples from the previous stage; unused if this stage reads a data set.
        """
        missing = framework_hooks.list_missing()
        if not missing:
            return self._run(below, indices, epochs)
        result = self._run(copy_arrays(below), indices, epochs)  # a copy, because functions may write to their input
        # If the code has now imported a framework, the framework's generator was not seeded: run the code again.
        return result if framework_hooks.list_missing() == missing else self._run(below, indices, epochs)

    def _run(self, below: Any, indices: Indices, epochs: Indices) -> Any:
        positions = list(range(len(indices)))
        groups = [[position] for position in positions] if self.is_cached else [positions]
        functions = [each.function for each in self.maps]
        # One thread, as in a reader process: the number of threads can change bits.
        with framework_hooks.use_one_thread(), IsolatedGenerators(self.dataset, *functions) as isolated:
            parts = []
            for group in groups:
                examples = self._compute_examples(below, indices, epochs, group, isolated)
                parts.append(self._run_batched(examples, indices[group], isolated))
            if not self.random and isolated.has_changed():
                raise _build_draw_error(indices)
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def _compute_examples(
        self, below: Any, indices: Indices, epochs: Indices, group: list[int], isolated: IsolatedGenerators
    ) -> Any:
        """Returns the batch of examples, from the data set or `below`, after the functions that take one example."""
        single = [each for each in self.maps if not each.batched]
        if self.dataset is None and not single and not isinstance(below, list):
            return below
        has_getitems = hasattr(self.dataset, "__getitems__")
        items = self._read_together(indices, epochs, group, isolated) if has_getitems else None
        examples = []
        for position in group:
            self._seed(isolated, int(epochs[position]), [int(indices[position])], 0 if items is None else 1)
            with _name_failed_examples(indices[[position]]):
                if items is not None:
                    example = items[position - group[0]]
                elif self.dataset is not None:
                    example = self.dataset[int(indices[position])]
                else:
                    example = select_example(below, position)
                for each in single:
                    example = each(example)
            examples.append(example)
        return stack(examples)

    def _read_together(
        self, indices: Indices, epochs: Indices, group: list[int], isolated: IsolatedGenerators
    ) -> list[Any]:
        """Returns several examples, read by the data set's `__getitems__`; the seed depends on all their indices."""
        wanted = [int(index) for index in indices[group]]
        self._seed(isolated, int(epochs[group[0]]), wanted, 0)
        with _name_failed_examples(indices[group]):
            items = list(self.dataset.__getitems__(wanted))
        if len(items) != len(wanted):
            raise BatchError(
                f"The data set's __getitems__ returned {len(items)} examples for {len(wanted)} indices. Return one "
                "example for each index."
            )
        return items

    def _run_batched(self, batch: Any, indices: Indices, isolated: IsolatedGenerators) -> Any:
        for each in self.maps:
            if each.batched:
                before = isolated.get_states()
                with _name_failed_examples(indices):
                    batch = batches.transform(batches.restore_tuples(each(batch)), to_numpy)
                if isolated.has_changed(before):
                    raise _build_draw_error(indices)
                if batches.count(batch) != len(indices):
                    raise BatchError(
                        f"A function given to .map after .batch returned {batches.describe(batch)} for {len(indices)} "
                        "examples. Return as many examples as the function was given, or use .map before .batch."
                    )
        return batch

    def _seed(self, isolated: IsolatedGenerators, epoch: int, indices: list[int], phase: int) -> None:
        if self.random:
            # Stages after a cache, and functions after `__getitems__` (phase 1), need different seeds.
            suffix = [self.number, phase] if self.number or phase else []
            isolated.seed(seeds.derive("example", self.seed, epoch, *indices, *suffix))


def _build_draw_error(indices: Indices) -> ExactError:
    return ExactError(
        f"A function given to .map drew random numbers while it computed {_name_examples(indices)}, from a "
        "process-wide random number generator, a generator that the function refers to, or a new generator without a "
        "seed, so its result depends on which examples were read before. Write .map(f, random=True) before .batch, "
        "with which all these generators are seeded for each example."
    )


@contextmanager
def _name_failed_examples(indices: Indices) -> Iterator[None]:
    """Raises ExampleError, with the indices of the examples, if the script's code raises inside the block."""
    try:
        yield
    except Exception as error:
        raise ExampleError(
            f"The data set or a function given to .map failed on {_name_examples(indices)}: {type(error).__name__}: "
            f"{error}. Fix the code, or leave such examples out."
        ) from error


def _name_examples(indices: Indices) -> str:
    if len(indices) == 1:
        return f"example {indices[0]}"
    first = ", ".join(str(index) for index in indices[:4])
    return f"examples {first}" + (f" … {indices[-1]} ({len(indices)} in all)" if len(indices) > 4 else "")
