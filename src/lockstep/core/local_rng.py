"""Random number generators that the script's code holds itself, beside those of the whole process.

`rng = np.random.default_rng(0)` as a global, in a closure or an attribute has a state of its own, which would depend on
how many examples this process has read. Such generators are found, seeded for each example, and restored afterwards,
like the global ones. A generator that code creates without a seed would take one from the operating system; here
numpy's and Python's take it from Python's global generator, so that it follows from that one's seed, and creating it
counts as a draw.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from lockstep.core import global_rng
from lockstep.core.find_rng import find_generators, find_generators_and_sequences
from lockstep.errors import ExactError


class IsolatedGenerators:
    """Inside `with`, all generators that these objects may draw from can be seeded; afterwards they are restored.

    >>> rng = np.random.default_rng(7)
    >>> with IsolatedGenerators([rng]) as isolated:
    ...     isolated.seed(1)
    ...     first = rng.normal(), np.random.default_rng().normal()
    ...     isolated.seed(1)
    ...     first == (rng.normal(), np.random.default_rng().normal())
    True
    >>> rng.normal() == np.random.default_rng(7).normal()
    True
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots

    def __enter__(self) -> "IsolatedGenerators":
        self._generators, sequences = find_generators_and_sequences(self._roots)
        self._sequences = [*sequences, *filter(None, map(_get_seed_sequence, self._generators))]
        self._spawned = [each.n_children_spawned for each in self._sequences]
        self._global = global_rng.get_states()
        self._local = [_get_state(each) for each in self._generators]
        self._entropy = _take_entropy_from_global()
        self._entropy.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._entropy.__exit__(None, None, None)
        global_rng.set_states(self._global)
        for each, state in zip(self._generators, self._local, strict=True):
            _set_state(each, state)
        if kind is None and list(map(id, find_generators(*self._roots))) != list(map(id, self._generators)):
            raise ExactError(
                "The code that reads the examples has created a random number generator and kept it for the next "
                "examples, so what it draws would depend on the examples read before. Create it before the data is "
                "read (in __init__), or in a local variable for each example: np.random.default_rng() without a seed "
                "is seeded from the run's seed."
            )
        if kind is None and [each.n_children_spawned for each in self._sequences] != self._spawned:
            raise ExactError(
                "The code that reads the examples has spawned from a generator or SeedSequence that it holds, so what "
                "it draws would depend on how often it did so before. Draw from the generator itself, or create one "
                "for each example: np.random.default_rng() without a seed is seeded from the run's seed."
            )

    def seed(self, value: int) -> None:
        """Seeds them all, each differently."""
        global_rng.seed_all(value)
        seed_generators(self._generators, value)

    def get_states(self) -> Any:
        """Returns a copy of all states, for `has_changed`."""
        return global_rng.get_states(), [_get_state(each) for each in self._generators]

    def has_changed(self, before: Any = None) -> bool:
        """Returns whether a number has been drawn since `before`, or since the start of the block."""
        before_global, before_local = (self._global, self._local) if before is None else before
        return global_rng.has_changed(before_global) or not all(
            _is_equal(_get_state(each), state) for each, state in zip(self._generators, before_local, strict=True)
        )


def seed_generators(generators: Iterable[Any], value: int) -> None:
    """Seeds the generators, each differently."""
    for index, each in enumerate(generators):
        _seed(each, [value, index])


def iterate_separately(begin: Callable[[], Iterator[Any]], generators: global_rng.SeparateGenerators) -> Iterator[Any]:
    """Calls `begin` now, and returns an iterator over the items of the iterator that it returns.

    `begin` and each item run with `generators`; generators that they create without a seed follow from those, too.
    """
    with generators, _take_entropy_from_global():
        items = begin()
    return _iterate(items, generators)


def _iterate(items: Iterator[Any], generators: global_rng.SeparateGenerators) -> Iterator[Any]:
    end = object()
    while True:
        with generators, _take_entropy_from_global():
            item = next(items, end)
        if item is end:
            return
        yield item


def _get_seed_sequence(generator: Any) -> Any:
    """Returns the SeedSequence from which a generator of numpy's spawns; None if it has none."""
    bits = generator if isinstance(generator, np.random.BitGenerator) else getattr(generator, "_bit_generator", None)
    sequence = getattr(bits, "_seed_seq", None)
    return sequence if isinstance(sequence, np.random.SeedSequence) else None


def _get_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, values: list[int]) -> None:
    sequence = np.random.SeedSequence(values)
    if isinstance(generator, np.random.Generator | np.random.BitGenerator | np.random.RandomState):
        bits = generator if isinstance(generator, np.random.BitGenerator) else generator._bit_generator  # type: ignore[union-attr]
        fresh = type(bits)(sequence)
        state = _get_state(np.random.RandomState(fresh) if isinstance(generator, np.random.RandomState) else fresh)
        _set_state(generator, state)
        return
    number = int(sequence.generate_state(1, np.uint64)[0])
    if isinstance(generator, random.Random):
        generator.seed(number)
    else:
        generator.manual_seed(number % 2**63)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return all(_is_equal(value, other[name]) for name, value in one.items())
    if hasattr(one, "numpy"):
        one, other = one.numpy(), other.numpy()
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def _is_for_file_names() -> bool:
    """Returns whether `tempfile` creates the generator. It only chooses file names, on which no example depends."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "random":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "tempfile"


@contextmanager
def _take_entropy_from_global() -> Iterator[None]:
    """Inside, generators that this thread creates without a seed take one from Python's global generator.

    Other threads are not affected, because they may belong to the script.
    """
    thread = threading.get_ident()
    numpy: Any = np.random.bit_generator  # the one place where all of numpy's generators get their entropy
    bits, seed = numpy.randbits, random.Random.seed

    def draw_bits(count: int) -> int:
        return random.getrandbits(count) if threading.get_ident() == thread else bits(count)

    def seed_new(self: random.Random, a: Any = None, version: int = 2) -> None:
        is_draw = a is None and threading.get_ident() == thread and not _is_for_file_names()
        seed(self, random.getrandbits(256) if is_draw else a, version)

    numpy.randbits, random.Random.seed = draw_bits, seed_new  # type: ignore[method-assign]
    try:
        yield
    finally:
        numpy.randbits, random.Random.seed = bits, seed  # type: ignore[method-assign]
