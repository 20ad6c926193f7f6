"""Chooses the numbers at the axes of a plot, and formats the values of a plot."""

import math

from lockstep.display.number_format import format_duration


def choose_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`.

    >>> choose_ticks(0.13, 0.94), choose_ticks(1, 10_000)
    ([0.2, 0.4, 0.6, 0.8], [2000.0, 4000.0, 6000.0, 8000.0, 10000.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.7)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def choose_integer_ticks(low: int, high: int, count: int = 5) -> list[int]:
    """Returns about `count` round integers from `low` to `high`, both of which are among them.

    >>> choose_integer_ticks(1, 3), choose_integer_ticks(0, 9_999)
    ([1, 2, 3], [0, 2000, 4000, 6000, 8000, 9999])
    """
    if high - low <= count:
        return list(range(low, high + 1))
    inner = [int(tick) for tick in choose_ticks(low, high, count) if tick == int(tick)]
    least = 0.6 * (inner[1] - inner[0]) if len(inner) > 1 else 0
    return [low, *(tick for tick in inner if tick - low > least and high - tick > least), high]


def format_tick(value: float) -> str:
    """Returns the number at an axis as a short text.

    >>> format_tick(0.2), format_tick(2000.0), format_tick(2.5e-7)
    ('0.2', '2,000', '2.5e-07')
    """
    return f"{value:,.10g}" if value == 0 or 1e-4 <= abs(value) < 1e7 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Returns a short time as text.

    >>> format_seconds(4.5e-6), format_seconds(0.00123), format_seconds(0.25), format_seconds(12.34)
    ('4.5 µs', '1.23 ms', '250 ms', '12.3 s')
    """
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{format_duration(seconds)} s"


def format_elapsed(seconds: float) -> str:
    """Returns the time since the beginning of a run as text.

    >>> format_elapsed(3.24), format_elapsed(75), format_elapsed(3723)
    ('3.2 s', '1:15', '1:02:03')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
