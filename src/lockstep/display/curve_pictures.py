"""Draws the curves of a run into a picture file or a notebook's cell.

The loss has its own panel, and all metrics between 0 and 1 share a panel. A metric on another scale (an error in
metres, a learning rate) gets its own panel, because it would flatten the other curves.

The figures are created without pyplot, which has global state and may need a display.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from numbers import Real
from typing import TYPE_CHECKING, Any

from lockstep.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[float]]

VALIDATION = "val_"
COLORS = ("#1f6fb4", "#d9661f", "#2e8b57", "#8a4fbf", "#b8324a", "#5f6b76")
PANEL_INCHES = (5.2, 3.9)
PANELS_PER_ROW = 3
MOST_MARKERS = 30
MOST_INSIDE = 4
"""If a panel has more lines than this, its legend is placed beside it."""
LEAST_SHARED = 0.05
"""A metric whose values are all smaller gets its own panel, because it would be a flat line on a scale up to 1."""


@dataclass(frozen=True)
class PanelAxes:
    """The labels and the fixed ranges of all panels; a range that is None follows the curves."""

    xlabel: str = "epoch"
    ylabel: str | None = None  # takes the place of the title
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None


def group_panels(curves: Curves) -> dict[str, list[str]]:
    """Returns the names of the metrics that each panel shows, without `val_`, by the title of the panel.

    >>> group_panels({"loss": [0.5], "accuracy": [0.9], "top5": [1.0], "mae": [12.5], "val_loss": [0.6]})
    {'loss': ['loss'], 'metrics': ['accuracy', 'top5'], 'mae': ['mae']}
    """
    result: dict[str, list[str]] = {}
    for name in dict.fromkeys(key.removeprefix(VALIDATION) for key in curves):
        values = [value for key in (name, VALIDATION + name) for value in curves.get(key, ()) if math.isfinite(value)]
        shared = name != "loss" and all(0 <= value <= 1 for value in values) and max(values, default=1) >= LEAST_SHARED
        result.setdefault("metrics" if shared else name, []).append(name)
    if len(result.get("metrics", ())) == 1:
        # A panel with one metric has the metric's name as its title.
        return {(names[0] if title == "metrics" else title): names for title, names in result.items()}
    return result


def load_figure_type() -> "type[Figure]":
    """Returns the class `Figure` of matplotlib; raises `MissingExtra` if matplotlib is not installed.

    >>> load_figure_type().__name__
    'Figure'
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            'Drawing curves needs matplotlib, which is not installed. Run: pip install "lockstep-train[plot]"'
        ) from error
    return Figure


def draw(epochs: Sequence[int], curves: Curves, panel_axes: PanelAxes | None = None) -> "Figure":
    """Returns a figure with the curves over the epochs, which are counted from 1 on the axis.

    >>> figure = draw([0, 1], {"loss": [0.7, 0.4], "accuracy": [0.8, 0.9]})
    >>> [axes.get_title() for axes in figure.axes]
    ['loss', 'accuracy']
    """
    Figure = load_figure_type()
    # Callbacks may have written strings into the history.
    curves = {name: values for name, values in curves.items() if all(isinstance(value, Real) for value in values)}
    grouped = group_panels(curves) or {"loss": []}
    rows = math.ceil(len(grouped) / PANELS_PER_ROW)
    columns = math.ceil(len(grouped) / rows)  # four panels are two by two
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), dpi=120, layout="constrained")
    for index, (title, names) in enumerate(grouped.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_panel(axes, [epoch + 1 for epoch in epochs], curves, names)
        chosen = panel_axes or PanelAxes()
        if chosen.ylabel is None:
            axes.set_title(title)
        _format_axes(axes, [epoch + 1 for epoch in epochs], chosen)
    return figure


def render_picture(figure: "Figure", kind: str = "png") -> bytes:
    """Returns the figure as the bytes of a picture file: png, svg or pdf.

    >>> render_picture(draw([0], {"loss": [0.5]}))[1:4]
    b'PNG'
    """
    buffer = BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _draw_panel(axes: "Axes", epochs: Sequence[int], curves: Curves, names: Sequence[str]) -> None:
    """Draws the curves of the metrics of one panel, each in one color: training solid, validation dashed."""
    marker = "o" if len(epochs) <= MOST_MARKERS else ""
    for index, name in enumerate(names):
        color = COLORS[index % len(COLORS)]
        prefix = f"{name}, " if len(names) > 1 else ""
        for key, label, line in ((name, "train", "-"), (VALIDATION + name, "validation", "--")):
            points = [
                (epoch, value)
                for epoch, value in zip(epochs, curves.get(key, ()), strict=False)
                if math.isfinite(value)
            ]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            # Hollow markers, so that a training point below a validation point is visible.
            face = color if key == name else "white"
            axes.plot(
                x, y, line, color=color, marker=marker, markersize=4, markerfacecolor=face, label=f"{prefix}{label}"
            )


def _format_axes(axes: "Axes", epochs: Sequence[int], chosen: PanelAxes) -> None:
    """Sets the labels, the ticks, the limits, the grid and the legend of a panel."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(chosen.xlabel)
    axes.set_ylabel(chosen.ylabel or "")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    if epochs:
        axes.set_xlim(left=max(axes.get_xlim()[0], min(epochs) - 0.5))  # without a tick for an epoch 0
    if len(set(epochs)) < 2:
        middle = epochs[0] if epochs else 1
        axes.set_xlim(middle - 0.5, middle + 0.5)
        axes.set_xticks([middle])
    if chosen.xlim is not None:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(*chosen.xlim)
    if chosen.ylim is not None:
        axes.set_ylim(*chosen.ylim)
    axes.grid(visible=True, color="#e3e6e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.lines) > MOST_INSIDE:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    elif axes.lines:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none")


def in_notebook() -> bool:
    """Returns whether this process runs in a notebook, whose cells can show pictures.

    >>> in_notebook()
    False
    """
    import rich  # imported here, because `import lockstep` should not wait for rich

    return rich.get_console().is_jupyter


def show_picture(png: bytes, output: Any = None) -> Any:
    """Shows a picture in the notebook's cell and returns the output; with `output`, replaces the picture there."""
    # Not an import statement, because IPython is not a dependency; a notebook has it.
    display = import_module("IPython.display")
    image = display.Image(data=png)
    if output is None:
        return display.display(image, display_id=True)
    output.update(image)
    return output
