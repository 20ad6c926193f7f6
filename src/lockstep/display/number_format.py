"""Formats numbers for the lines, bars and tables that a run prints.

Values have four significant digits, including trailing zeros, so that their width does not change from step to step.
"""

import math
from numbers import Real
from typing import Any


def format_significant(value: Any) -> str:
    """Returns a number as text with four significant digits; returns `str(value)` for any other value.

    >>> format_significant(0.41237), format_significant(0.87), format_significant(1234.5), format_significant(2.5e-7)
    ('0.4124', '0.8700', '1234', '2.500e-07')
    """
    return f"{value:#.4g}".rstrip(".") if isinstance(value, Real) else str(value)


def to_float(value: Any) -> Any:
    """Returns a number, or an array without axes, as a float; returns any other value unchanged.

    >>> to_float(3), to_float("3"), to_float([1, 2])
    (3.0, '3', [1, 2])
    """
    return float(value) if isinstance(value, Real) or getattr(value, "ndim", None) == 0 else value


def format_duration(seconds: float) -> str:
    """Returns a time in seconds as text: with one decimal, or, below one second, with two significant digits.

    >>> format_duration(9.24), format_duration(0.0341), format_duration(1234.5)
    ('9.2', '0.034', '1234.5')
    """
    return f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2g}"


def format_countdown(seconds: float) -> str:
    """Returns the remaining time as text such as `1:02:03`, rounded up so that it is `0:00` only at the end.

    >>> format_countdown(6.2), format_countdown(75), format_countdown(3723)
    ('0:07', '1:15', '1:02:03')
    """
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_rate(per_second: float) -> str:
    """Returns a speed as text, with thousands separators, and with decimals only below 100.

    >>> format_rate(6521.3), format_rate(12.34), format_rate(0.0421)
    ('6,521', '12.3', '0.042')
    """
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return format_duration(per_second)
