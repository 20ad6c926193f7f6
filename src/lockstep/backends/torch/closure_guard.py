"""Surroundings: what a loss takes from around it, which workers have as it was when they were started.

A teacher network, a GAN's other half, a number that is annealed: closure variables,
globals, defaults and the attributes of the loss object. They are compared before each
command; what the loss itself changes while it computes is taken for seen.
"""

import dis
import functools
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from lockstep.backends.torch.attributes import LONGEST, is_plain, version
from lockstep.core.objective import Objective
from lockstep.errors import ExactError

LARGEST = 2**20  # bytes of an array that are compared; of a larger one, only which it is


class Surroundings:
    """Those of one loss; the model's own modules and tensors reach the workers by themselves."""

    def __init__(self, loss: Any, model: nn.Module) -> None:
        self._loss = loss
        self._own = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
        self._seen: dict[str, Any] | None = None

    def note(self) -> None:
        """The workers get it as it is now."""
        self._seen = self._marks()

    def look(self) -> None:
        """Takes what the loss itself has just changed for seen, where somebody asks."""
        if self._seen is not None:
            self.note()

    def check(self) -> None:
        """Raises where the script has changed something since."""
        if self._seen is None:
            return
        now = self._marks()
        for name in {**self._seen, **now}:
            if not _same(self._seen.get(name), now.get(name)):
                raise ExactError(
                    f"What a loss takes from around it stays in the workers as it was when they were started. {name!r} "
                    "was changed since. Put it into the batch or into a buffer of the model, call trainer.close() "
                    "after such a change, which starts them anew, or use devices=1."
                )

    def _marks(self) -> dict[str, Any]:
        marks: dict[str, Any] = {}
        for name, value in _around(self._loss):
            if id(value) not in self._own:
                mark = self._mark(value)
                if mark is not None:
                    marks[name] = mark
        return marks

    def _mark(self, value: Any) -> Any:
        """What tells whether it has changed; None for what is not looked into."""
        if isinstance(value, Tensor):
            return [value, version(value), value.data_ptr()]
        if isinstance(value, nn.Module):
            tensors = [each for each in (*value.parameters(), *value.buffers()) if id(each) not in self._own]
            plain = [[item for item in vars(each).items() if is_plain(item[1])] for each in _others(value, self._own)]
            return [value, repr(plain), *(part for each in tensors for part in self._mark(each))]
        if isinstance(value, np.ndarray):
            return [value, zlib.crc32(value.tobytes()) if value.nbytes <= LARGEST else 0]
        if isinstance(value, types.FunctionType):
            return [value]
        if type(value) is dict and len(value) <= LONGEST and all(map(is_plain, value.values())):
            return [repr(value)]
        return [repr(value)] if is_plain(value) else None


def _others(module: nn.Module, own: set[int]) -> Iterator[nn.Module]:
    return (each for each in module.modules() if id(each) not in own)


def _same(one: Any, other: Any) -> bool:
    """Whether two marks tell of the same; objects by being one, the rest by its value."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    pairs = zip(one, other, strict=True)
    return all(left is right or (isinstance(left, int | str) and left == right) for left, right in pairs)


def _around(loss: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything that the loss can reach by a name in its code."""
    if isinstance(loss, Objective):
        yield from _around(loss.function)
    elif isinstance(loss, functools.partial):
        yield from ((str(index), value) for index, value in enumerate(loss.args))
        yield from loss.keywords.items()
        yield from _around(loss.func)
    elif isinstance(loss, types.MethodType):
        if isinstance(loss.__func__, types.FunctionType):
            yield from _of_function(loss.__func__, {"self": loss.__self__}, set())
    elif isinstance(loss, types.FunctionType):
        yield from _of_function(loss, {}, set())
    elif isinstance(loss, nn.Module):  # what it holds travels by itself
        yield from _of_method(type(loss), "forward")
    elif hasattr(loss, "__dict__"):
        yield from ((f"{type(loss).__name__}.{name}", value) for name, value in vars(loss).items())
        yield from _of_method(type(loss), "__call__")


def _of_method(kind: type, name: str) -> Iterator[tuple[str, Any]]:
    function = getattr(kind, name, None)
    if isinstance(function, types.FunctionType) and not function.__module__.startswith("torch."):
        yield from _of_function(function, {}, set())


def _of_function(function: types.FunctionType, bound: Mapping[str, Any], walked: set[int]) -> Iterator[tuple[str, Any]]:
    """What the function and the helpers of its file refer to; of an object or a module, the attributes they name."""
    walked.add(id(function.__code__))
    names, attributes = _referred(function.__code__)
    around = {name: function.__globals__[name] for name in names if name in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    around |= dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    around |= {**(function.__kwdefaults__ or {}), **bound}
    for name, value in around.items():
        yield name, value
        if isinstance(value, types.FunctionType):
            if value.__module__ == function.__module__ and id(value.__code__) not in walked:
                yield from _of_function(value, {}, walked)
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            held = vars(value)
            yield from ((f"{name}.{each}", held[each]) for each in attributes if each in held)


@functools.cache
def _referred(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals and the attributes that the code names, with those of the functions inside of it."""
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = _referred(constant)
            names |= dict.fromkeys(inner)
            attributes |= dict.fromkeys(more)
    return tuple(names), tuple(attributes)
