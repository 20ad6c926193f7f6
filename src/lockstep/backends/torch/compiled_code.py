"""Rejects code from torch.compile and TorchScript, which gives different bits in different processes.

A worker gets the model by pickle, which leaves compiled code out, and what torch.compile generates for a function
depends on what the process has compiled before. TorchScript's first call computes other bits than its second, so
the bits would depend on which process computes which shard.

The way to run compiled code is `wrap(compile=True)`, with which each process compiles for itself (shard_compiler.py).

Code that this search does not find (a function in a container, a global that is replaced later) runs uncompiled,
because in an exact run `settings.Preparation` turns torch.compile off.
"""

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.backends.torch.function_references import find_names, list_references
from lockstep.core.metrics import Metric
from lockstep.core.objective import Objective
from lockstep.errors import ModelError

_OWN = vars(nn.Module()).keys()
_LIBRARIES = ("torch.", "torch._", "numpy.", "builtins", "lockstep.")
DEPTH = 4  # of functions that call functions


def check_compiled(model: nn.Module, optimizer: Any, loss: Any, metrics: Sequence[Metric]) -> None:
    """Raises ModelError if a model, an optimizer, a loss or a metric contains compiled code."""
    check_modules(name_modules(model, loss))
    _check_object(model, "the model")
    _check_object(loss, "the loss")
    for metric in metrics:
        _check_object(metric.sums, f"the metric {metric.name!r}")
    _check_object(vars(optimizer).get("step"), "optimizer.step")


def name_modules(model: nn.Module, loss: Any) -> dict[str, nn.Module]:
    """Returns every module of a model and of its loss, by a description of the module for errors."""
    roots = [("the model", model)] + ([("the loss", loss)] if isinstance(loss, nn.Module) else [])
    return {f"{name}'s {path!r}" if path else name: each for name, root in roots for path, each in root.named_modules()}


def check_modules(named: Mapping[str, nn.Module]) -> None:
    """Raises ModelError if one of `name_modules`' modules is compiled, or has a compiled function as an attribute."""
    for where, module in named.items():
        own = vars(module)
        if own.get("_compiled_call_impl") is not None:
            raise _build_error(f"compile() was called on {where}, {type(module).__name__}", "Leave that call out")
        if isinstance(module, torch.jit.ScriptModule):
            raise _build_error(f"{where} is compiled with TorchScript", "Use the module that was scripted or traced")
        if "_orig_mod" in module._modules:
            raise _build_error(f"{where} is compiled with torch.compile", "Use the module itself, its _orig_mod")
        for name, value in own.items():
            if name not in _OWN:
                _check_value(value, f"{name!r} of {where}")


def _check_object(value: Any, where: str) -> None:
    """Raises ModelError if a function is compiled or calls a compiled one, or if an object has such a method."""
    if isinstance(value, nn.Module):
        classes = {type(module) for module in value.modules()}
        bases = dict.fromkeys(base for each in classes for base in each.__mro__ if not _is_library(base))
        held = [(f"{base.__name__}.{name}", each) for base in bases for name, each in vars(base).items()]
    elif isinstance(value, Objective):
        held = [(where, value.function)]
    elif isinstance(value, functools.partial):
        _check_object(value.func, where)
        held = [(where, each) for each in (*value.args, *value.keywords.values())]
    elif _find_compiler(value) or isinstance(value, types.FunctionType | types.MethodType):
        held = [(where, value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        held = [(f"{name!r} of {where}", each) for name, each in vars(value).items()]
        bases = dict.fromkeys(base for base in type(value).__mro__ if not _is_library(base))
        held += [(f"{base.__name__}.{name}", each) for base in bases for name, each in vars(base).items()]
    else:
        return
    walked: set[int] = set()
    for name, each in held:
        _check_value(each, name)
        function = getattr(each, "__func__", each)  # of bound and static methods
        if isinstance(function, types.FunctionType):
            for called, inner in _list_references(function, walked, DEPTH):
                _check_value(inner, f"{called!r}, which {where} uses,")


def _check_value(value: Any, where: str) -> None:
    kind = _find_compiler(value)
    if kind:
        raise _build_error(f"{where} is compiled with {kind}", "Use the plain function")
    if type(value) in (list, tuple, dict):
        for each in value.values() if isinstance(value, dict) else value:
            if kind := _find_compiler(each):
                raise _build_error(f"{where} contains an object compiled with {kind}", "Use the plain function")


def _find_compiler(value: Any) -> str:
    """Returns `torch.compile` or `TorchScript` for a compiled function or module; else an empty string."""
    if isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return "TorchScript"
    if isinstance(value, nn.Module):
        compiled = "_orig_mod" in vars(value).get("_modules", {}) or vars(value).get("_compiled_call_impl") is not None
        return "torch.compile" if compiled else ""
    function = getattr(value, "__func__", value) if isinstance(value, types.MethodType | staticmethod) else value
    if not isinstance(function, types.FunctionType):
        return ""
    marks = vars(function)  # a function under torch.compiler.disable has both
    plain = "_torchdynamo_orig_callable" not in marks or marks.get("_torchdynamo_disable")
    return "" if plain else "torch.compile"


def _list_references(function: types.FunctionType, walked: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for each global or closure variable of a function and of the functions that it calls."""
    if id(function.__code__) in walked or (function.__module__ or "").startswith(_LIBRARIES):
        return
    walked.add(id(function.__code__))
    names = find_names(function.__code__)
    found = {each.name: each.read() for each in list_references(function)}
    for name, value in [*found.items()]:
        if isinstance(value, types.ModuleType) and not value.__name__.startswith(("torch", "numpy")):
            found |= {f"{name}.{each}": vars(value)[each] for each in names if each in vars(value)}
    for name, value in found.items():
        yield name, value
        if isinstance(value, types.FunctionType) and depth:
            yield from _list_references(value, walked, depth - 1)


def _is_library(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_LIBRARIES) or kind is object


def _build_error(what: str, instead: str) -> ModelError:
    return ModelError(
        f"An exact run needs plain PyTorch code, but {what}. Compiled code may give other bits in another process. "
        f"{instead}, with lockstep.wrap(..., compile=True), which on CPUs compiles the model and the loss in every "
        "process; or use lockstep.wrap(..., exact=False)."
    )
