"""Random number generators that code holds itself, beside the ones that belong to the whole process.

`rng = np.random.default_rng(0)` as a global, in a closure or an attribute has a state of its own, which would depend on
how many examples this process has read. They are found by following what the code uses, and are then treated as the
process's own: seeded for each example, put back afterwards. One that code makes anew without a seed would take it from
the operating system; numpy's and Python's take it from Python's global generator here, so it follows from that one's
seed, and to make one counts as a draw.
"""

import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np

from lockstep.core import global_rng
from lockstep.core.code_names import list_chains, list_codes
from lockstep.core.packages import is_installed
from lockstep.errors import ExactError

MOST_ENTRIES = 1000  # a longer list or dict is not looked into
_MOST_OBJECTS = 20_000
_LEAVES = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)
_PLAIN_CONTAINERS = frozenset((list, tuple, dict))


class IsolatedGenerators:
    """Inside `with`, all generators that these objects may draw from can be seeded; afterwards they are as they were.

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
        self._held, sequences = _find(self._roots)
        self._sequences = [*sequences, *filter(None, map(_seed_sequence, self._held))]
        self._spawned = [each.n_children_spawned for each in self._sequences]
        self._global, self._own = global_rng.states(), [_state(each) for each in self._held]
        self._entropy = _entropy_from_global()
        self._entropy.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._entropy.__exit__(None, None, None)
        global_rng.put(self._global)
        for each, state in zip(self._held, self._own, strict=True):
            _put(each, state)
        if kind is None and list(map(id, find_generators(*self._roots))) != list(map(id, self._held)):
            raise ExactError(
                "What is drawn for an example must follow from the seed. The code that reads the examples has created "
                "a random number generator and kept it for the next ones. Create it before the data is read (in "
                "__init__), or in a local variable for each example: np.random.default_rng() without a seed is seeded "
                "from the run's seed."
            )
        if kind is None and [each.n_children_spawned for each in self._sequences] != self._spawned:
            raise ExactError(
                "What is drawn for an example must follow from the seed. The code that reads the examples has spawned "
                "from a generator or SeedSequence that it holds, and what comes of that follows from how often it did "
                "so before. Draw from the generator itself, or create one for each example: np.random.default_rng() "
                "without a seed is seeded from the run's seed."
            )

    def seed(self, value: int) -> None:
        """Seeds them all, each differently."""
        global_rng.seed(value)
        seed_generators(self._held, value)

    def states(self) -> Any:
        """Returns a copy of all states, for `has_moved`."""
        return global_rng.states(), [_state(each) for each in self._held]

    def has_moved(self, before: Any = None) -> bool:
        """Returns whether somebody has drawn since `before`, or since the beginning."""
        there, own = (self._global, self._own) if before is None else before
        return global_rng.moved(there) or not all(
            _is_equal(_state(each), state) for each, state in zip(self._held, own, strict=True)
        )


def seed_generators(held: Iterable[Any], value: int) -> None:
    """Seeds such generators, each differently."""
    for index, each in enumerate(held):
        _seed(each, [value, index])


def read_apart(begin: Callable[[], Iterator[Any]], apart: global_rng.Apart) -> Iterator[Any]:
    """Returns the iterator that `begin` makes, begun now.

    It and its items are made with the generators of `apart`, from which new ones without a seed follow, too.
    """
    with apart, _entropy_from_global():
        items = begin()
    return _read_apart(items, apart)


def _read_apart(items: Iterator[Any], apart: global_rng.Apart) -> Iterator[Any]:
    end = object()
    while True:
        with apart, _entropy_from_global():
            item = next(items, end)
        if item is end:
            return
        yield item


def find_generators(*roots: Any) -> list[Any]:
    """Returns the generators that functions and objects hold, in an order that every process finds.

    Followed are closures, defaults, the global names that code of the script's own looks up, attributes, methods, and
    the entries of lists, tuples and dicts.
    """
    return _find(roots)[0]


def _find(roots: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the generators, and the SeedSequences that are held beside them."""
    shared, torch = _list_shared(), _torch()
    leaf_kinds = frozenset(_LEAVES if torch is None else (*_LEAVES, torch.Tensor))
    found: list[Any] = []
    sequences: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.popleft()
        if type(value) in leaf_kinds or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        if type(value) in _PLAIN_CONTAINERS:  # most of what examples are described with; it is looked at in every batch
            entries = _list_entries(value)
            if not leaf_kinds.issuperset(map(type, entries)):
                waiting.extend(entries)
        elif _is_generator(value):
            if not any(value is each for each in shared):
                found.append(value)
        elif isinstance(value, np.random.SeedSequence):
            sequences.append(value)
        else:
            waiting.extend(_list_references(value))
    return found, sequences


def _seed_sequence(generator: Any) -> Any:
    """Returns what a generator of numpy's spawns from; None if there is nothing."""
    bits = generator if isinstance(generator, np.random.BitGenerator) else getattr(generator, "_bit_generator", None)
    sequence = getattr(bits, "_seed_seq", None)
    return sequence if isinstance(sequence, np.random.SeedSequence) else None


def _list_references(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from vars(value).values()
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        if not is_installed(value.__globals__.get("__name__", "")):
            yield from _list_globals(value)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
        yield value.__wrapped__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, type):
        if not is_installed(value.__module__):
            yield from (*value.__bases__, *vars(value).values())
    elif not isinstance(value, ModuleType):
        yield from _list_contents(value)


def _list_entries(value: Any) -> Iterable[Any]:
    """The entries of a list, tuple, deque or dict that is not too long."""
    if len(value) > MOST_ENTRIES:
        return ()
    entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return entries


def _list_contents(value: Any) -> Iterator[Any]:
    """Yields what an object holds: its entries, its attributes, its class."""
    if isinstance(value, list | tuple | deque | dict):
        yield from _list_entries(value)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, Mapping):
        yield from attributes.values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not is_installed(kind.__module__):
                yield getattr(value, name)
    if isinstance(value, BuiltinFunctionType | MethodWrapperType):
        yield value.__self__
    yield type(value)


def _list_globals(function: FunctionType) -> Iterator[Any]:
    for chain in _sort_chains(function.__code__):
        value = function.__globals__.get(chain[0])
        for name in chain[1:]:
            if not isinstance(value, ModuleType) or is_installed(value.__name__):
                break
            value = getattr(value, name, None)
        yield value


@functools.lru_cache(maxsize=4096)
def _sort_chains(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The names that code and the functions inside it look up, read once: this is asked for every batch."""
    return tuple(sorted({chain for each in list_codes(code) for chain in list_chains(each)}))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018, it raises where nothing was assigned yet
    except ValueError:
        return False
    return True


def _torch() -> Any:
    return sys.modules.get("torch")


def _list_shared() -> list[Any]:
    """Returns the generators that belong to the process, with which `generators` deals."""
    legacy = np.random.mtrand._rand  # what np.random.seed seeds
    torch = _torch()
    own = [random._inst, legacy, legacy._bit_generator]
    return own if torch is None else [*own, torch.default_generator]


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.SystemRandom):
        return False  # it has no state
    torch = _torch()
    kinds = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
    return isinstance(value, kinds) or (torch is not None and isinstance(value, torch.Generator))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put(generator: Any, state: Any) -> None:
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
        _put(generator, _state(np.random.RandomState(fresh) if isinstance(generator, np.random.RandomState) else fresh))
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
    """Whether `tempfile` makes the generator, with which it chooses the names of files: no example depends on these."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "random":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "tempfile"


@contextmanager
def _entropy_from_global() -> Iterator[None]:
    """Inside, generators that this thread makes without a seed take one from Python's global generator."""
    thread = threading.get_ident()
    numpy: Any = np.random.bit_generator  # the one place from which all of numpy's take their entropy
    bits, seed = numpy.randbits, random.Random.seed

    def draw_bits(count: int) -> int:
        return random.getrandbits(count) if threading.get_ident() == thread else bits(count)

    def seed_fresh(self: random.Random, a: Any = None, version: int = 2) -> None:
        is_draw = a is None and threading.get_ident() == thread and not _is_for_file_names()
        seed(self, random.getrandbits(256) if is_draw else a, version)

    numpy.randbits, random.Random.seed = draw_bits, seed_fresh  # type: ignore[method-assign]
    try:
        yield
    finally:
        numpy.randbits, random.Random.seed = bits, seed  # type: ignore[method-assign]
