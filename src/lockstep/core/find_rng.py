"""Finds the random number generators that functions and objects refer to.

The search follows closures, default arguments, the global names that the script's code looks up, attributes, methods,
and the entries of lists, tuples and dicts. It does not search installed packages.
"""

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np

from lockstep.core import framework_hooks
from lockstep.core.code_names import list_chains, list_codes
from lockstep.core.packages import is_installed

MAX_ENTRIES = 1000  # a longer list or dict is not searched
_MAX_OBJECTS = 20_000
_LEAVES = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)
_PLAIN_CONTAINERS = frozenset((list, tuple, dict))
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def find_generators(*roots: Any) -> list[Any]:
    """Returns the random number generators that functions and objects refer to, in the same order in every process."""
    return find_generators_and_sequences(roots)[0]


def find_generators_and_sequences(roots: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the random number generators, and the SeedSequences of numpy, to which these objects refer."""
    hooks = framework_hooks.list_imported()
    shared, generator_kinds = _list_shared(), _list_generator_kinds()
    leaf_kinds = frozenset((*_LEAVES, *(kind for each in hooks for kind in each.ARRAY_TYPES)))
    found: list[Any] = []
    sequences: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = deque(roots)
    while waiting and len(seen) < _MAX_OBJECTS:
        value = waiting.popleft()
        if type(value) in leaf_kinds or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        # Every batch is searched, and most data sets are described by plain containers of numbers. So a container in
        # which no entry can refer to a generator is skipped as a whole.
        if type(value) in _PLAIN_CONTAINERS:
            entries = _list_entries(value)
            if not leaf_kinds.issuperset(map(type, entries)):
                waiting.extend(entries)
        elif isinstance(value, generator_kinds) and not isinstance(value, random.SystemRandom):  # which has no state
            if not any(value is each for each in shared):
                found.append(value)
        elif isinstance(value, np.random.SeedSequence):
            sequences.append(value)
        else:
            waiting.extend(_list_references(value))
    return found, sequences


def is_generator(value: Any) -> bool:
    """Returns whether `value` is a random number generator of Python, numpy or an imported framework."""
    return isinstance(value, _list_generator_kinds())


def _list_generator_kinds() -> tuple[type, ...]:
    return (*_GENERATORS, *(kind for hooks in framework_hooks.list_imported() for kind in hooks.GENERATOR_TYPES))


def _list_shared() -> list[Any]:
    """Returns the process-wide generators, which `global_rng` seeds and restores."""
    legacy = np.random.mtrand._rand  # the generator that np.random.seed seeds
    frameworks = [hooks.get_default_generator() for hooks in framework_hooks.list_imported()]
    return [random._inst, legacy, legacy._bit_generator, *frameworks]


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
    """Returns the entries of a list, tuple, deque or dict; an empty tuple if there are more than `MAX_ENTRIES`."""
    if len(value) > MAX_ENTRIES:
        return ()
    entries: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return entries


def _list_contents(value: Any) -> Iterator[Any]:
    """Yields the entries, attributes and class of an object."""
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
    """Returns the sorted names that a code object and the functions inside it look up; cached for the next batch."""
    return tuple(sorted({chain for each in list_codes(code) for chain in list_chains(each)}))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018, raises if nothing has been assigned yet
    except ValueError:
        return False
    return True
