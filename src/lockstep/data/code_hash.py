"""Hashes Python objects by value: functions with everything they use, classes with their methods, objects by state.

For the standard library and installed packages the name and version are hashed. Everything else (the script, its own
modules) is followed: names that a function looks up, closures, defaults, base classes, attributes. For an object, what
pickle would store is hashed, because a reader process gets only that. Memory addresses, line numbers, the order of sets
and docstrings of classes are left out, so that the same script has the same hash in every process.
"""

import copyreg
import functools
import hashlib
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

import numpy as np

from lockstep.core import framework_hooks
from lockstep.core.code_names import list_chains, list_codes, list_imports
from lockstep.core.find_rng import is_generator
from lockstep.core.packages import describe_package, is_installed
from lockstep.errors import BatchError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_DESCRIPTORS = (WrapperDescriptorType, MethodDescriptorType, GetSetDescriptorType, MemberDescriptorType)
# With these functions, code can use names that do not appear in it.
_LOOKUPS = ("eval", "exec", "globals", "__import__")
# Attributes that Python or pickle adds to a class.
_GENERATED = {
    *("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__slotnames__", "_abc_impl"),
    *("__abstractmethods__", "__firstlineno__", "__static_attributes__", "__parameters__", "__annotate__"),
    *("__annotations_cache__", "__annotate_func__", "__orig_bases__", "__match_args__", "__hash__"),
}


class CodeHash:
    """Computes the hash of a Python object and everything it refers to. `hash_array` returns a text for an array."""

    def __init__(self, hash_array: Callable[[Any], str]) -> None:
        self._hash_array = hash_array
        self._hashes: dict[int, str] = {}  # by id
        self._objects: list[Any] = []  # the hashed objects, kept alive so that no new object gets the same id
        self._open: dict[int, int] = {}  # objects that are being hashed: id to depth
        self._path: list[str] = []

    def hash(self, value: Any, name: str) -> str:
        """Returns the hash of `value`; `name` is what an error calls the value."""
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        key = id(value)
        if key in self._hashes:
            return self._hashes[key]
        if key in self._open:
            return f"back to {self._open[key]}"
        self._open[key] = len(self._open)
        self._path.append(name)
        self._objects.append(value)
        try:
            parts = [type(value).__name__, *self._list_parts(value)]
        finally:
            self._path.pop()
            del self._open[key]
        result = self._hashes[key] = hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()
        return result

    def _list_parts(self, value: Any) -> Iterator[str]:
        for kinds, list_parts in _KINDS:
            if isinstance(value, kinds):
                return list_parts(self, value)
        if is_generator(value):
            return iter(["random number generator"])  # without its state, which a map stage seeds for each example
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            return iter([self._hash_array(framework_hooks.to_numpy_or_bytes(value))])
        return self._hash_object(value)

    def _hash_each(self, values: Any, name: str = "an entry") -> Iterator[str]:
        return (self.hash(each, name) for each in values)

    def _hash_list(self, value: Any) -> Iterator[str]:
        if set(map(type, value)) <= set(_PLAIN):  # fast for a million file names
            return iter([type(value).__name__, *map(repr, value)])
        return self._hash_each(value) if type(value) in (list, tuple) else self._hash_object(value)

    def _hash_dict(self, value: Any) -> Iterator[str]:
        if type(value) is not dict and not isinstance(value, MappingProxyType):
            yield from self._hash_object(value)
            return
        for key, item in value.items():
            yield self.hash(key, "a key")
            yield self.hash(item, f"[{key!r}]")

    def _hash_set(self, value: Any) -> Iterator[str]:
        yield from sorted(self._hash_each(value)) if type(value) in (set, frozenset) else self._hash_object(value)

    def _hash_numpy(self, value: Any) -> Iterator[str]:
        yield self._hash_array(value)

    def _hash_code(self, value: CodeType) -> Iterator[str]:
        yield value.co_code.hex()
        yield repr((value.co_names, value.co_varnames, value.co_cellvars, value.co_freevars, value.co_flags))
        yield repr((value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount))
        yield value.co_exceptiontable.hex()  # only this says which instructions a `try` covers
        yield from self._hash_each(value.co_consts, "a constant")

    def _hash_function(self, value: FunctionType) -> Iterator[str]:
        yield value.__name__
        yield from self._hash_code(value.__code__)
        yield self.hash(value.__defaults__, f"a default of {value.__qualname__}")
        yield self.hash(value.__kwdefaults__, f"a default of {value.__qualname__}")
        yield self.hash(vars(value), f"an attribute of {value.__qualname__}")
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield self._hash_cell(cell, name)
        module = value.__globals__.get("__name__", "")
        if is_installed(module):
            yield describe_package(module)
        else:
            yield from self._hash_globals(value)

    def _hash_cell(self, cell: Any, name: str) -> str:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return f"{name} is empty"
        return self.hash(content, name)

    def _hash_globals(self, function: FunctionType) -> Iterator[str]:
        names: dict[str, set[tuple[str, ...]]] = {}
        for code in list_codes(function.__code__):
            for chain in list_chains(code):
                names.setdefault(chain[0], set()).add(chain[1:])
            for module in list_imports(code, function.__globals__):
                yield self._hash_import(module)
        for name in sorted(names):
            if name not in function.__globals__:
                if name in _LOOKUPS:
                    self._refuse(f"{name}(), which {function.__qualname__} calls")
                continue
            value = function.__globals__[name]
            for attributes in sorted(names[name]):
                yield f"{name}.{'.'.join(attributes)}"
                yield self._hash_attribute(value, name, attributes)

    def _hash_import(self, name: str) -> str:
        try:
            module = importlib.import_module(name)
        except ImportError:  # `try: import x` in the function, and x is not installed
            return f"no module {name}"
        return self.hash(module, f"the module {name}")

    def _hash_attribute(self, value: Any, name: str, attributes: tuple[str, ...]) -> str:
        """Hashes the value of a global name; of a module of the script, only the attribute that is used."""
        while isinstance(value, ModuleType):
            if is_installed(value.__name__):
                if (value.__name__, *attributes[:1]) == ("importlib", "import_module"):
                    self._refuse(f"{name}.import_module()")
                return describe_package(value.__name__)
            if not attributes or not hasattr(value, attributes[0]):
                break
            value, name, attributes = getattr(value, attributes[0]), attributes[0], attributes[1:]
        return self.hash(value, name)

    def _hash_method(self, value: MethodType) -> Iterator[str]:
        yield self.hash(value.__func__, value.__func__.__name__)
        yield self.hash(value.__self__, f"the object of {value.__func__.__name__}")

    def _hash_bound(self, value: Any) -> Iterator[str]:
        """Hashes a method of a built-in object (`table.get`), or a built-in function."""
        yield value.__name__
        if value.__self__ is None or isinstance(value.__self__, ModuleType):
            yield self._identify_by_name(value)
        else:
            yield self.hash(value.__self__, f"the object of {value.__name__}")

    def _hash_descriptor(self, value: Any) -> Iterator[str]:
        yield value.__name__
        yield value.__objclass__.__qualname__

    def _hash_partial(self, value: "functools.partial[Any]") -> Iterator[str]:
        yield from self._hash_each((value.func, value.args, value.keywords, vars(value)), "the partial")

    def _hash_property(self, value: property) -> Iterator[str]:
        yield from self._hash_each((value.fget, value.fset, value.fdel), "a property")

    def _hash_wrapped(self, value: Any) -> Iterator[str]:
        """Hashes the function inside a `staticmethod`, `classmethod` or `functools.lru_cache`."""
        yield self.hash(value.__wrapped__, "the function in it")

    def _hash_cached_property(self, value: Any) -> Iterator[str]:
        yield self.hash(value.func, value.attrname)

    def _hash_module(self, value: ModuleType) -> Iterator[str]:
        yield value.__name__
        if is_installed(value.__name__):
            yield describe_package(value.__name__)
            return
        for name in sorted(set(vars(value)) - {"annotations"}):
            if not (name.startswith("__") and name.endswith("__")):
                yield name
                yield self.hash(vars(value)[name], f"{value.__name__}.{name}")

    def _hash_class(self, value: type) -> Iterator[str]:
        yield value.__qualname__
        if is_installed(value.__module__):
            yield describe_package(value.__module__)
            return
        yield from self._hash_each(value.__bases__, "a base class")
        yield self.hash(type(value), "the metaclass")
        for name in sorted(set(vars(value)) - _GENERATED):
            yield name
            yield self.hash(vars(value)[name], f"{value.__qualname__}.{name}")

    def _hash_object(self, value: Any) -> Iterator[str]:
        """Hashes what pickle would store of an object."""
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        except Exception:
            self._refuse(f"a {type(value).__module__}.{type(value).__qualname__}")
        if isinstance(reduced, str):
            yield self._identify_by_name(value, reduced)
            return
        yield self.hash(type(value), type(value).__qualname__)
        make, arguments, state, entries, items = (*reduced, None, None, None)[:5]
        yield self.hash(make, "its constructor")
        yield from self._hash_each(arguments, "an argument of its constructor")
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                for name in sorted(part, key=str):
                    yield str(name)
                    yield self.hash(part[name], f"{type(value).__qualname__}.{name}")
            else:
                yield self.hash(part, "its state")
        yield self.hash(None if entries is None else list(entries), "its entries")
        yield self.hash(None if items is None else list(items), "its items")

    def _identify_by_name(self, value: Any, name: str = "") -> str:
        """Returns the package's version and the object's name, for an object of an installed or compiled module."""
        name = name or str(getattr(value, "__qualname__", None) or getattr(value, "__name__", ""))
        own = getattr(value, "__module__", None)
        if isinstance(value, BuiltinFunctionType):
            return f"{describe_package(own or 'builtins')} {name}"
        # torch.float32 and numpy's ufuncs do not name their module: try the module of their type, then pickle's search.
        searched = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
        for module in (own or type(value).__module__, searched):
            candidate: Any = sys.modules.get(module)
            for part in name.split("."):
                candidate = getattr(candidate, part, None)
            if candidate is value:
                return f"{describe_package(module)} {name}"
        self._refuse(f"a {type(value).__module__}.{type(value).__qualname__} named {name!r}")

    def _refuse(self, what: str) -> NoReturn:
        place = " > ".join(self._path)
        raise BatchError(
            f".cache(path) cannot tell whether {what} (found at: {place}) has changed since the file was written. "
            'Use .cache(path, key="1") and change the key after every change of data or code, or .cache() to store the '
            "examples in memory only."
        )


_KINDS: list[tuple[Any, Callable[[CodeHash, Any], Iterator[str]]]] = [
    (type, CodeHash._hash_class),
    (FunctionType, CodeHash._hash_function),
    (CodeType, CodeHash._hash_code),
    (MethodType, CodeHash._hash_method),
    ((BuiltinFunctionType, MethodWrapperType), CodeHash._hash_bound),
    (_DESCRIPTORS, CodeHash._hash_descriptor),
    (functools.partial, CodeHash._hash_partial),
    (property, CodeHash._hash_property),
    ((staticmethod, classmethod, functools._lru_cache_wrapper), CodeHash._hash_wrapped),
    (functools.cached_property, CodeHash._hash_cached_property),
    (ModuleType, CodeHash._hash_module),
    (np.ndarray, CodeHash._hash_numpy),
    ((list, tuple), CodeHash._hash_list),
    ((dict, MappingProxyType), CodeHash._hash_dict),
    ((set, frozenset), CodeHash._hash_set),
]
