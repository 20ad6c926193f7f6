"""How numbers are written in lines, bars and tables.

A number keeps its width while it changes: four significant digits, trailing zeros included.
"""

import math
from numbers import Real
from typing import Any


def format_significant(value: Any) -> str:
    """Write a number with four significant digits; return text that a callback has written unchanged.

    >>> format_significant(0.41237), format_significant(0.87), format_significant(1234.5), format_significant(2.5e-7)
    ('0.4124', '0.8700', '1234', '2.500e-07')
    """
    return f"{value:#.4g}".rstrip(".") if isinstance(value, Real) else str(value)


def to_float(value: Any) -> Any:
    """Convert a number, also one in an array without axes, to a float; return anything else unchanged.

    >>> to_float(3), to_float("3"), to_float([1, 2])
    (3.0, '3', [1, 2])
    """
    return float(value) if isinstance(value, Real) or getattr(value, "ndim", None) == 0 else value


def format_duration(seconds: float) -> str:
    """Write a measured time in seconds: with a tenth from one second on, with two digits below.

    >>> format_duration(9.24), format_duration(0.0341), format_duration(1234.5)
    ('9.2', '0.034', '1234.5')
    """
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2g}"


def format_countdown(seconds: float) -> str:
    """Write the time left as on a clock, rounded up so that it is 0:00 only at the end.

    >>> format_countdown(6.2), format_countdown(75), format_countdown(3723)
    ('0:07', '1:15', '1:02:03')
    """
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_rate(per_second: float) -> str:
    """Write a speed: with thousands separators, and decimals only below 100.

    >>> format_rate(6521.3), format_rate(12.34), format_rate(0.0421)
    ('6,521', '12.3', '0.042')
    """
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return format_duration(per_second)
