"""Seeds and restores the random number generators that the script has created, beside the process-wide generators.

A generator such as `rng = np.random.default_rng(0)` in a global name, a closure or an attribute has a state of its own,
which would depend on how many examples this process has read. Lockstep finds such generators, seeds them for each
example and restores them afterwards. A generator that is created without a seed would be seeded by the operating
system; here new generators of numpy and Python take their seed from Python's process-wide generator instead, so they
depend on its seed, and creating one counts as drawing a number.
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
    """A context in which all generators that these objects refer to can be seeded; restores their states at the end.

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
                "The data set or a function given to .map has created a random number generator and kept it for later "
                "examples, so the numbers it draws would depend on which examples were read before. Create the "
                "generator before the data is read (in __init__), or in a local variable for each example: "
                "np.random.default_rng() without a seed is seeded from the run's seed."
            )
        if kind is None and [each.n_children_spawned for each in self._sequences] != self._spawned:
            raise ExactError(
                "The data set or a function given to .map has called spawn() of a random number generator or "
                "SeedSequence that is used for several examples, so the numbers would depend on how often spawn() was "
                "called before. Draw from the generator itself, or create a generator for each example: "
                "np.random.default_rng() without a seed is seeded from the run's seed."
            )

    def seed(self, value: int) -> None:
        """Seeds the process-wide generators and those of these objects, each with a different seed from `value`."""
        global_rng.seed_all(value)
        seed_generators(self._generators, value)

    def get_states(self) -> Any:
        """Returns a copy of the states of all these generators, for `has_changed`."""
        return global_rng.get_states(), [_get_state(each) for each in self._generators]

    def has_changed(self, before: Any = None) -> bool:
        """Returns whether a number has been drawn since `before` was read; by default, since the block began."""
        before_global, before_local = (self._global, self._local) if before is None else before
        return global_rng.has_changed(before_global) or not all(
            _is_equal(_get_state(each), state) for each, state in zip(self._generators, before_local, strict=True)
        )


def seed_generators(generators: Iterable[Any], value: int) -> None:
    """Seeds each of the generators with a different seed, which depends on `value` and the generator's position."""
    for index, each in enumerate(generators):
        _seed(each, [value, index])


def iterate_separately(begin: Callable[[], Iterator[Any]], generators: global_rng.SeparateGenerators) -> Iterator[Any]:
    """Calls `begin` now, and returns an iterator over the items of its result.

    The call and each item are computed with the states in `generators`. Generators that this code creates without a
    seed are seeded from these states too.
    """
    with generators, _take_entropy_from_global():
        items = begin()
    return generators.iterate(items, _take_entropy_from_global)


def _get_seed_sequence(generator: Any) -> Any:
    """Returns the SeedSequence from which a numpy generator spawns others; None if it has no SeedSequence."""
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
    """Returns whether `tempfile` is creating this generator, which chooses file names and cannot affect an example."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "random":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "tempfile"


@contextmanager
def _take_entropy_from_global() -> Iterator[None]:
    """Seeds generators that are created without a seed from Python's process-wide generator, inside the block.

    Only generators that this thread creates are affected, because other threads may belong to the script.
    """
    thread = threading.get_ident()
    numpy: Any = np.random.bit_generator  # all generators of numpy get their entropy from this module
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
