"""Checks of arguments of public functions.

Each check names the argument and the value in its error, and raises the caller's kind of error.
"""

import math
import os
from numbers import Real
from typing import Any

import numpy as np

from lockstep.errors import LockstepError


def check_path(name: str, value: Any, error: type[LockstepError], example: str) -> str:
    """Returns the path as a string; raises `error` if the value is empty or not a path.

    >>> from lockstep.errors import SaveError
    >>> check_path("path", "ckpt/", SaveError, "ckpt/")
    'ckpt/'
    >>> check_path("path", 3, SaveError, "ckpt/")
    Traceback (most recent call last):
    lockstep.errors.SaveError: path must be a path. Got 3. Use for example 'ckpt/'.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise error(f"{name} must be a path. Got {show(value)}. Use for example {example!r}.")
    return path


def check_number(name: str, value: Any, error: type[LockstepError], example: float) -> float:
    """Returns the number unchanged; raises `error` if it is not a finite number of Python or numpy.

    >>> from lockstep.errors import CallbackError
    >>> check_number("decay", 0.9, CallbackError, 0.999)
    0.9
    >>> check_number("decay", "x", CallbackError, 0.999)
    Traceback (most recent call last):
    lockstep.errors.CallbackError: decay must be a finite number. Got 'x'. Use for example decay=0.999.
    """
    if not is_number(value) or not math.isfinite(value):
        raise error(f"{name} must be a finite number. Got {show(value)}. Use for example {name}={example}.")
    number: float = value
    return number


def check_flag(name: str, value: Any, error: type[LockstepError]) -> bool:
    """Returns the flag as True or False; 1 and 0 are accepted too. Raises `error` for any other value.

    >>> from lockstep.errors import CallbackError
    >>> check_flag("append", 1, CallbackError)
    True
    """
    if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
        raise error(f"{name} must be True or False. Got {show(value)}. Use for example {name}=True.")
    return bool(value)


def check_integer(name: str, value: Any, error: type[LockstepError], least: int) -> int:
    """Returns the integer unchanged; raises `error` if the value is not an integer of at least `least`.

    >>> from lockstep.errors import CallbackError
    >>> check_integer("patience", 3, CallbackError, least=0)
    3
    >>> check_integer("patience", 2.5, CallbackError, least=0)
    Traceback (most recent call last):
    lockstep.errors.CallbackError: patience must be an integer, 0 or more. Got 2.5. Use for example patience=0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} must be an integer, {least} or more. Got {show(value)}. Use for example {name}={least}.")
    return value


def is_number(value: Any) -> bool:
    """Returns whether `value` is a real number of Python or numpy; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def show(value: Any) -> str:
    """Returns a short text for a value in an error message: an array's type and shape, or the start of the repr."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__} of shape {tuple(shape)}" if shape else f"{value!r:.100}"
