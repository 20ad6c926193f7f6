"""Checks the arguments of public methods: explains wrong or missing arguments, and checks integers."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from lockstep.errors import ArgumentError, BatchError

P = ParamSpec("P")
R = TypeVar("R")

INSTEAD: Mapping[str, Mapping[str, str]] = {
    "fit": {
        "workers": "Use .prefetch(n) of a lockstep.data pipeline.",
        "use_multiprocessing": "Use .prefetch(n) of a lockstep.data pipeline.",
        "max_queue_size": "Use .prefetch(n) of a lockstep.data pipeline.",
        "steps": "Use steps_per_epoch=.",
    },
    "evaluate": {"callbacks": "Use fit(validation_data=..., callbacks=[...])."},
    "predict": {"callbacks": "Leave callbacks out, because only fit calls them."},
    "step": {"y": "Put inputs and targets into one batch: step((x, y))."},
    "wrap": {
        "criterion": "Use loss=.",
        "strategy": "Leave strategy out, or choose the devices, for example with devices=2.",
        **dict.fromkeys(("gpus", "num_gpus", "num_devices", "device_ids", "accelerator"), "Use devices=."),
    },
}
"""For each method, keywords that other libraries have, and what to write instead of each."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function raise ArgumentError, which suggests the right keyword, if a call does not fit its signature.

    Type checkers, editors and `help` see the unchanged signature.

    >>> @explain_arguments
    ... def fit(x, y=None, *, epochs=1, batch_size=None): return epochs
    >>> fit([], epoch=3)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: fit() has no keyword 'epoch'. Did you mean epochs=?
    >>> fit([], [], 32)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: fit() takes at most 2 positional arguments: x, y. Got 3. Give the other arguments \
by name, e.g. epochs=...
    """
    parameters = inspect.signature(function).parameters
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [name for name in positional if parameters[name].default is inspect.Parameter.empty]
    names = frozenset(parameters)

    @functools.wraps(function)
    def call_checked(*args: P.args, **kwargs: P.kwargs) -> R:
        missing = [name for name in required[len(args) :] if name not in kwargs]
        if missing or len(args) > len(positional) or not names.issuperset(kwargs):
            named = [name for name in parameters if name != "self"]
            raise ArgumentError(_explain(function.__name__, named, positional, len(args), missing, list(kwargs)))
        return function(*args, **kwargs)

    return call_checked


def _explain(
    method: str, names: list[str], positional: list[str], num_given: int, missing: list[str], keywords: list[str]
) -> str:
    """Returns the message that says what is wrong with the arguments of a call, and what to write instead."""
    for name in keywords:
        if name in names:
            continue
        if hint := INSTEAD.get(method, {}).get(name):
            return f"{method}() has no keyword {name!r}. {hint}"
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        return f"{method}() has no keyword {name!r}. " + (
            f"Did you mean {near[0]}=?" if near else f"Use one of {', '.join(names)}."
        )
    if missing:
        return f"{method}() needs the argument {missing[0]}. Its arguments are {', '.join(names)}."
    bound = int("self" in positional)
    taken = [name for name in positional if name != "self"]
    rest = [name for name in names if name not in taken]
    example = f"Give the other arguments by name, e.g. {rest[0]}=..." if rest else f"Use {method}({', '.join(taken)})."
    if method == "step":
        example = "Put inputs and targets into one batch: step((x, y))."
    return (
        f"{method}() takes at most {len(taken)} positional argument{'s' * (len(taken) > 1)}: {', '.join(taken)}. "
        f"Got {num_given - bound}. {example}"
    )


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Returns the number as an `int`; raises if it is not an integer of at least `least`. A bool is not an integer.

    >>> check_integer("epochs", 3)
    3
    >>> check_integer("epochs", 2.5)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: epochs must be an integer, 1 or more. Got epochs=2.5. Use epochs=2, for example.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and value >= least:
        return int(value)
    near = int(value) if isinstance(value, float) and least <= value < 2**31 else max(least, 1)
    kind = BatchError if whole else ArgumentError
    raise kind(f"{name} must be an integer, {least} or more. Got {name}={value!r}. Use {name}={near}, for example.")


def check_optional_integer(name: str, value: Any) -> int | None:
    """Returns None if the value is None, and otherwise what `check_integer` returns."""
    return None if value is None else check_integer(name, value)
