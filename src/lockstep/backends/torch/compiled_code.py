"""Refuses code from torch.compile and TorchScript, of which processes make different bits.

A worker gets the model by pickle, which leaves compiled code out, and what torch.compile makes of a
function depends on what the process has compiled before. TorchScript's first call computes other bits
than its second, so the bits would follow from who computes which shard.

What this search does not reach (a function in a container, a global that is replaced later) runs
uncompiled all the same: in an exact run `settings.computing` turns torch.compile off.
"""

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.core.metrics import Metric
from lockstep.core.objective import Objective
from lockstep.errors import ModelError

_OWN = vars(nn.Module()).keys()
_LIBRARIES = ("torch.", "torch._", "numpy.", "builtins", "lockstep.")
DEPTH = 4  # of functions that call functions


def check_compiled(model: nn.Module, optimizer: Any, loss: Any, metrics: Sequence[Metric]) -> None:
    """Refuses a model, a loss, metrics or an optimizer with compiled code in it."""
    check_modules(name_modules(model, loss))
    _check(model, "the model")
    _check(loss, "the loss")
    for metric in metrics:
        _check(metric.sums, f"the metric {metric.name!r}")
    _check(vars(optimizer).get("step"), "optimizer.step")


def name_modules(model: nn.Module, loss: Any) -> dict[str, nn.Module]:
    """Every module of a model and of its loss, by where it is."""
    roots = [("the model", model)] + ([("the loss", loss)] if isinstance(loss, nn.Module) else [])
    return {f"{name}'s {path!r}" if path else name: each for name, root in roots for path, each in root.named_modules()}


def check_modules(named: Mapping[str, nn.Module]) -> None:
    """Refuses modules that were compiled, or that hold compiled functions; `named` has them by where they are."""
    for where, module in named.items():
        own = vars(module)
        if own.get("_compiled_call_impl") is not None:
            raise _refusal(f"compile() was called on {where}, {type(module).__name__}", "Leave that call out")
        if isinstance(module, torch.jit.ScriptModule):
            raise _refusal(f"{where} is from TorchScript", "Use the module that was scripted or traced")
        if "_orig_mod" in module._modules:
            raise _refusal(f"{where} is from torch.compile", "Use the module itself, its _orig_mod")
        for name, value in own.items():
            if name not in _OWN:
                _check_value(value, f"{name!r} of {where}")


def _check(value: Any, where: str) -> None:
    """Refuses a function that is compiled or calls compiled ones, and objects with such methods."""
    if isinstance(value, nn.Module):
        classes = {type(module) for module in value.modules()}
        bases = dict.fromkeys(base for each in classes for base in each.__mro__ if not _is_library(base))
        held = [(f"{base.__name__}.{name}", each) for base in bases for name, each in vars(base).items()]
    elif isinstance(value, Objective):
        held = [(where, value.function)]
    elif isinstance(value, functools.partial):
        _check(value.func, where)
        held = [(where, each) for each in (*value.args, *value.keywords.values())]
    elif _kind(value) or isinstance(value, types.FunctionType | types.MethodType):
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
        function = getattr(each, "__func__", each)  # of a bound method and of a static one
        if isinstance(function, types.FunctionType):
            for called, inner in _reached(function, walked, DEPTH):
                _check_value(inner, f"{called!r}, which {where} uses,")


def _check_value(value: Any, where: str) -> None:
    kind = _kind(value)
    if kind:
        raise _refusal(f"{where} is from {kind}", "Use the plain function")
    if type(value) in (list, tuple, dict):
        for each in value.values() if isinstance(value, dict) else value:
            if kind := _kind(each):
                raise _refusal(f"{where} holds what is from {kind}", "Use the plain function")


def _kind(value: Any) -> str:
    """What has compiled it; empty for plain code."""
    if isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return "TorchScript"
    if isinstance(value, nn.Module):
        compiled = "_orig_mod" in vars(value).get("_modules", {}) or vars(value).get("_compiled_call_impl") is not None
        return "torch.compile" if compiled else ""
    function = getattr(value, "__func__", value) if isinstance(value, types.MethodType | staticmethod) else value
    if not isinstance(function, types.FunctionType):
        return ""
    marks = vars(function)  # a function that torch.compiler.disable keeps plain has both
    plain = "_torchdynamo_orig_callable" not in marks or marks.get("_torchdynamo_disable")
    return "" if plain else "torch.compile"


def _reached(function: types.FunctionType, walked: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """(name, value) of what the function and the functions it calls refer to by name."""
    if id(function.__code__) in walked or (function.__module__ or "").startswith(_LIBRARIES):
        return
    walked.add(id(function.__code__))
    names = _names(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, value in [*found.items()]:
        if isinstance(value, types.ModuleType) and not value.__name__.startswith(("torch", "numpy")):
            found |= {f"{name}.{each}": vars(value)[each] for each in names if each in vars(value)}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    found |= {f"a default {index}": value for index, value in enumerate(function.__defaults__ or ())}
    found |= function.__kwdefaults__ or {}
    for name, value in found.items():
        yield name, value
        if isinstance(value, types.FunctionType) and depth:
            yield from _reached(value, walked, depth - 1)


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that the code names, with those of the functions inside of it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _is_library(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_LIBRARIES) or kind is object


def _refusal(what: str, instead: str) -> ModelError:
    return ModelError(
        "An exact run computes plain PyTorch code, which gives the same bits in every process. Got other code: "
        f"{what}. {instead}, or use lockstep.wrap(..., exact=False)."
    )
