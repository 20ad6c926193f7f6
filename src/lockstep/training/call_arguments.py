"""Arguments of the public methods: calls that do not fit are explained, and numbers are checked."""

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
        "workers": "Read ahead with lockstep.data: .prefetch(n).",
        "use_multiprocessing": "Read ahead with lockstep.data: .prefetch(n).",
        "max_queue_size": "Read ahead with lockstep.data: .prefetch(n).",
        "steps": "Use steps_per_epoch=.",
    },
    "evaluate": {"callbacks": "Give them to fit(validation_data=..., callbacks=[...])."},
    "predict": {"callbacks": "Leave them out: callbacks go with fit."},
    "step": {"y": "Put inputs and targets into one batch: step((x, y))."},
    "wrap": {
        "criterion": "Use loss=.",
        "strategy": "Leave it out: devices=2, say, is all there is to choose.",
        **dict.fromkeys(("gpus", "num_gpus", "num_devices", "device_ids", "accelerator"), "Use devices=."),
    },
}
"""By method: what to write in the place of keywords that other libraries take."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: a call that does not fit its signature raises ArgumentError with the nearest keyword.

    The signature stays what it is for type checkers, editors and `help`.

    >>> @explain_arguments
    ... def fit(x, y=None, *, epochs=1, batch_size=None): return epochs
    >>> fit([], epoch=3)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: fit() has no keyword 'epoch'. Did you mean epochs=?
    >>> fit([], [], 32)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: fit() takes at most 2 arguments without a name: x, y. Got 3. Name the others, \
e.g. epochs=...
    """
    parameters = inspect.signature(function).parameters
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [name for name in positional if parameters[name].default is inspect.Parameter.empty]
    names = frozenset(parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        missing = [name for name in required[len(args) :] if name not in kwargs]
        if missing or len(args) > len(positional) or not names.issuperset(kwargs):
            named = [name for name in parameters if name != "self"]
            raise ArgumentError(_explain(function.__name__, named, positional, len(args), missing, list(kwargs)))
        return function(*args, **kwargs)

    return checked


def _explain(
    method: str, names: list[str], positional: list[str], num_given: int, missing: list[str], keywords: list[str]
) -> str:
    """What is wrong with the call, and what to write."""
    for name in keywords:
        if name in names:
            continue
        if hint := INSTEAD.get(method, {}).get(name):
            return f"{method}() has no keyword {name!r}. {hint}"
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        return f"{method}() has no keyword {name!r}. " + (
            f"Did you mean {near[0]}=?" if near else f"It takes {', '.join(names)}."
        )
    if missing:
        return f"{method}() needs {missing[0]}. Got none. It takes {', '.join(names)}."
    bound = int("self" in positional)
    taken = [name for name in positional if name != "self"]
    rest = [name for name in names if name not in taken]
    example = f"Name the others, e.g. {rest[0]}=..." if rest else f"Use {method}({', '.join(taken)})."
    if method == "step":
        example = "Put inputs and targets into one batch: step((x, y))."
    return (
        f"{method}() takes at most {len(taken)} argument{'s' * (len(taken) > 1)} without a name: {', '.join(taken)}. "
        f"Got {num_given - bound}. {example}"
    )


def checked_integer(name: str, value: Any, least: int = 1) -> int:
    """Return the number as an int; raise if it is no integer or below `least`. A numpy integer is one, a bool is not.

    >>> checked_integer("epochs", 3)
    3
    >>> checked_integer("epochs", 2.5)
    Traceback (most recent call last):
    ...
    lockstep.errors.ArgumentError: epochs is an integer from 1 on. Got epochs=2.5. Use epochs=2, for example.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and value >= least:
        return int(value)
    near = int(value) if isinstance(value, float) and least <= value < 2**31 else max(least, 1)
    kind = BatchError if whole else ArgumentError
    raise kind(f"{name} is an integer from {least} on. Got {name}={value!r}. Use {name}={near}, for example.")


def checked_optional(name: str, value: Any) -> int | None:
    """Return the number as `checked_integer` does, and None as it is."""
    return None if value is None else checked_integer(name, value)
