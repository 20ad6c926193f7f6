"""Finds what a function refers to by name: globals, closure variables, defaults, and names of attributes."""

import functools
import io
import types
from typing import Any, NamedTuple

import cloudpickle


class Reference(NamedTuple):
    """A place from which a function reads: a name in a dict or a class, a cell of its closure, or a default."""

    name: str
    holder: Any
    key: Any = None
    is_sent: bool = True  # and not read from a module that each worker imports by itself

    def read(self) -> Any:
        """Returns the value that is there now; None if there is none."""
        if isinstance(self.holder, dict | types.MappingProxyType):
            return self.holder.get(self.key)
        if isinstance(self.holder, types.CellType):
            return None if self.holder == types.CellType() else self.holder.cell_contents
        defaults = self.holder.__defaults__ or ()
        return defaults[self.key] if self.key < len(defaults) else None


def list_references(function: types.FunctionType) -> list[Reference]:
    """Returns the globals and closure variables that cloudpickle would send with a function, and the defaults.

    >>> def scaled(x, by=2):
    ...     return Any, x * by
    >>> [(each.name, each.read()) for each in list_references(scaled)] == [("Any", Any), ("by", 2)]
    True
    """
    # Of a copy, because cloudpickle sends nothing with a function that a worker can import.
    copy = types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    pickler = cloudpickle.Pickler(io.BytesIO())
    _, state = pickler.reducer_override(copy)[2]
    is_sent = not is_imported(function)
    found = [Reference(name, function.__globals__, name, is_sent) for name in state["__globals__"]]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found += [Reference(name, cell, None, is_sent) for name, cell in cells]
    num_parameters, num_defaults = function.__code__.co_argcount, len(function.__defaults__ or ())
    names = function.__code__.co_varnames[num_parameters - num_defaults : num_parameters]
    found += [Reference(name, function, index, is_sent) for index, name in enumerate(names)]
    return found + [Reference(name, function.__kwdefaults__, name, is_sent) for name in function.__kwdefaults__ or ()]


def is_imported(named: types.FunctionType | type) -> bool:
    """Returns whether workers import this function or class by its name, so that a pickle has nothing else of it."""
    return cloudpickle.Pickler(io.BytesIO()).reducer_override(named) is NotImplemented


@functools.cache
def find_names(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals and attributes in the code, including those in inner functions."""
    inner = [find_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
