"""How numbers are written in lines, bars and tables.

A number keeps its width while it changes: four significant digits, trailing zeros included.
"""

import math
from numbers import Real
from typing import Any


def significant(value: Any) -> str:
    """Writes a number with four significant digits; text that a callback has written stays as it is.

    >>> significant(0.41237), significant(0.87), significant(1234.5), significant(2.5e-7)
    ('0.4124', '0.8700', '1234', '2.500e-07')
    """
    return f"{value:#.4g}".rstrip(".") if isinstance(value, Real) else str(value)


def as_float(value: Any) -> Any:
    """A number, also one in an array without axes, as a float; anything else that a callback has written as it is.

    >>> as_float(3), as_float("3"), as_float([1, 2])
    (3.0, '3', [1, 2])
    """
    return float(value) if isinstance(value, Real) or getattr(value, "ndim", None) == 0 else value


def duration(seconds: float) -> str:
    """Writes a measured time in seconds: a tenth is enough above one second.

    >>> duration(9.24), duration(0.0341), duration(1234.5)
    ('9.2', '0.034', '1234.5')
    """
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2g}"


def countdown(seconds: float) -> str:
    """Writes the time left as a clock does, rounded up so that it ends at 0:00 and not before.

    >>> countdown(6.2), countdown(75), countdown(3723)
    ('0:07', '1:15', '1:02:03')
    """
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def rate(per_second: float) -> str:
    """Writes a speed: thousands apart, digits after the point only where they say something.

    >>> rate(6521.3), rate(12.34), rate(0.0421)
    ('6,521', '12.3', '0.042')
    """
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return duration(per_second)
