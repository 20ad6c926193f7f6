"""The panels with the curves of loss and metrics, as HTML with inline SVG.

The SVG has no text and is stretched to the width of the page; the text beside it is HTML, so that it keeps its size.
"""

import math
from collections.abc import Sequence
from html import escape
from numbers import Real
from typing import Any

from lockstep.display.curve_pictures import VALIDATION, Curves, group_panels
from lockstep.display.number_format import format_significant
from lockstep.display.report.ticks import choose_integer_ticks, choose_ticks, format_tick

_PADDING = 0.05  # of the range of the values, above and below the curves
_MOST_MARKERS = 30


def render_panels(epochs: Sequence[int], curves: Curves) -> tuple[str, list[Any]]:
    """Returns the HTML of all panels, and each panel's values by epoch, which the page shows at the pointer."""
    numeric = {name: values for name, values in curves.items() if all(isinstance(value, Real) for value in values)}
    html, data = list[str](), list[Any]()
    for title, names in group_panels(numeric).items() if epochs else ():
        series = [
            (key, "val" if key.startswith(VALIDATION) else "train", index % 6)
            for index, name in enumerate(names)
            for key in (name, VALIDATION + name)
            if any(math.isfinite(value) for value in numeric.get(key, ()))
        ]
        if series:
            values = [[float(value) for value in numeric[key]] for key, _, _ in series]
            labels = [_name_line(key, kind, len(names) > 1) for key, kind, _ in series]
            data.append([labels, [[format_significant(value) for value in column] for column in values]])
            lines = [(label, kind, color) for label, (_, kind, color) in zip(labels, series, strict=True)]
            html.append(_render_panel(len(html), title, epochs, lines, values))
    return "".join(html), data


def _name_line(key: str, kind: str, has_others: bool) -> str:
    words = "validation" if kind == "val" else "train"
    return f"{key.removeprefix(VALIDATION)}, {words}" if has_others else words


def _render_panel(
    index: int,
    title: str,
    epochs: Sequence[int],
    lines: Sequence[tuple[str, str, int]],
    columns: Sequence[Sequence[float]],
) -> str:
    finite = [value for column in columns for value in column if math.isfinite(value)]
    low, high = min(finite), max(finite)
    margin = _PADDING * (high - low) or max(abs(high), 1e-12) * _PADDING
    low, high = low - margin, high + margin
    first, last = epochs[0] + 1, epochs[-1] + 1

    def place_x(epoch: int) -> float:
        return 100 * (epoch - first) / (last - first) if last > first else 50.0

    def place_y(value: float) -> float:
        return 100 * (high - value) / (high - low)

    ticks = [(tick, place_y(tick)) for tick in choose_ticks(low, high)]
    grid = "".join(f'<path class="grid" d="M0 {y:.2f}H100"/>' for _, y in ticks)
    drawn, legend = [], []
    for (label, kind, color), column in zip(lines, columns, strict=True):
        points = [
            f"{place_x(epoch + 1):.2f} {place_y(value):.2f}"
            for epoch, value in zip(epochs, column, strict=True)
            if math.isfinite(value)
        ]
        drawn.append(f'<path class="line {kind} c{color}" d="M{"L".join(points)}"/>')
        if len(epochs) <= _MOST_MARKERS:  # a line of length 0 with round ends is a dot, which is not stretched
            drawn.append(f'<path class="dots c{color}" d="{"".join(f"M{point}h0" for point in points)}"/>')
        legend.append(f'<span class="key {kind} c{color}">{escape(label)}</span>')
    y_labels = "".join(f'<span style="top:{y:.2f}%">{format_tick(tick)}</span>' for tick, y in ticks)
    x_labels = "".join(
        f'<span style="left:{place_x(tick):.2f}%">{tick:,}</span>' for tick in choose_integer_ticks(first, last)
    )
    return (
        f'<figure><figcaption><b>{escape(title)}</b> {"".join(legend)}</figcaption><div class="plot">'
        f'<div class="y">{y_labels}</div><div class="area" data-panel="{index}" tabindex="0">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(title)} by epoch">'
        f'{grid}{"".join(drawn)}</svg></div><div class="x">{x_labels}</div></div><p class="axis">epoch</p></figure>'
    )
