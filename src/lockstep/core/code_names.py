"""Reads from a function's bytecode which global names it looks up and which modules it imports."""

import dis
import importlib.util
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code object of a function and those of the functions, comprehensions and classes inside it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from list_codes(each)


def list_chains(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yields each global name that a code object looks up, with its attributes: (helper, table, get).

    That is what the code `helper.table.get` looks up; a name without attributes is yielded as a tuple of one name.
    """
    chain: tuple[str, ...] = ()
    for each in dis.get_instructions(code):
        if chain and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, each.argval)
        elif each.opname not in ("CACHE", "PRECALL"):
            if chain:
                yield chain
            chain = (each.argval,) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    if chain:
        yield chain


def list_imports(code: CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yields the full names of the modules that a code object imports when it runs."""
    level = 0
    instructions = list(dis.get_instructions(code))
    for index, each in enumerate(instructions):
        if each.opname == "IMPORT_NAME":
            constants = [before.argval for before in instructions[max(0, index - 2) : index]]
            level = constants[0] if constants and isinstance(constants[0], int) else 0
            relative = f"{'.' * level}{each.argval}"
            yield importlib.util.resolve_name(relative, names.get("__package__")) if level else each.argval
