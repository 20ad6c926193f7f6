"""Modes: where a model is told whether it trains.

People put it in one of three places: an argument of the call (`train`, `training`,
`is_training`, or `deterministic`, which means the opposite), a field of that name,
or, in nnx, the flags that `model.train()` and `model.eval()` turn.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

FLAGS = ("deterministic", "use_running_average")  # what `train()` and `eval()` of an nnx module turn
_NAMES = {"train": True, "training": True, "is_training": True, "deterministic": False}


def argument(call: Callable[..., Any]) -> str | None:
    """The argument of the call that tells the mode, if there is one.

    >>> argument(lambda x, *, deterministic=True: x)
    'deterministic'
    """
    return _first(accepted(call))


def field(fields: Mapping[str, Any]) -> str | None:
    """The field that tells the mode, if there is one.

    >>> field({"width": 3, "training": True})
    'training'
    """
    return _first({name for name, value in fields.items() if tells(name, value)})


def fields(module: Any) -> list[str]:
    """The fields of one module, or of its class, that tell the mode; a method of such a name does not.

    >>> fields(type("Net", (), {"training": True, "train": lambda self: None})())
    ['training']
    """
    return [name for name in _NAMES if tells(name, inspect.getattr_static(module, name, ""))]


def tells(name: str, value: Any) -> bool:
    """Whether an attribute of this name and value tells the mode.

    >>> tells("training", True), tells("training", "slowly"), tells("scale", True)
    (True, False, False)
    """
    return (name in _NAMES or name in FLAGS) and (value is None or isinstance(value, bool))


def value(name: str, training: bool) -> bool:
    """What the argument or field of this name is set to.

    >>> value("train", True), value("deterministic", True)
    (True, False)
    """
    return training == _NAMES[name]


def accepted(call: Callable[..., Any]) -> set[str]:
    """The names of the arguments that a call takes by name."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return set()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in kinds}


def takes_any(call: Callable[..., Any]) -> bool:
    """Whether a call takes arguments that it does not name.

    >>> takes_any(lambda x, **more: x)
    True
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _first(names: Collection[str]) -> str | None:
    return next((name for name in _NAMES if name in names), None)
