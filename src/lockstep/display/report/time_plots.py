"""The plots of where the time of a run went, by device and by part of a step, with the events beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from lockstep.core.step_bins import STEPS, StepBins
from lockstep.core.time_breakdown import PARTS
from lockstep.display.report.png import NUM_LEVELS, encode_levels
from lockstep.display.report.ticks import choose_integer_ticks, choose_ticks, format_elapsed, format_seconds

PAUSES = ("waiting for data", "checkpoint", "repeated")  # what all replicas wait for, beside the parts of a step
BARS = ("compute", "exchange", "update", "input", *PAUSES)
_MOST_MEDIANS = 3.0  # the scale ends at so many times the median: one slow step does not make all others look alike
_MOST_STACKS = 64  # in a table of more devices the bars are left out


@dataclass(frozen=True)
class RunEvent:
    """A moment of a run that is marked on the axis of the steps."""

    kind: str  # "lost", "joined", "left", "notice" or "checkpoint"
    step: int
    seconds: float  # since the run began
    text: str


def render_times(bins: StepBins, devices: Sequence[str], events: Sequence[RunEvent]) -> tuple[str, dict[str, Any]]:
    """Returns the HTML of all plots over the steps, and the plots' values, which the page shows at the pointer.

    `devices` are the names of all replicas that the bins have, in order.
    """
    replicas = sorted(bins.replicas)
    tables = {part: _tabulate(bins, part) for part in PARTS}
    maps = "".join(_render_map(part, tables[part], devices) for part in ("compute", "exchange", "update", "input"))
    axis, markers = _render_axis(bins), _render_markers(bins, events)
    breakdown, bars = _render_breakdown(bins, replicas)
    html = (
        f'{maps}<div class="plot wide">{markers}{axis}</div>'
        f'<h3>Where a step goes <small>mean of the devices</small></h3><div class="plot wide">{breakdown}{axis}</div>'
    )
    data = {
        "first": bins.first_step,
        "width": bins.width,
        "steps": [each.num_steps for each in bins.bins],
        "devices": list(devices),
        "parts": {part: [[_to_microseconds(value) for value in row] for row in rows] for part, rows in tables.items()},
        "bars": {name: [_to_microseconds(value) for value in row] for name, row in bars.items() if any(row)},
    }
    return html, data


Table = list[list[float | None]]  # a row for each replica, a column for each bin


def _tabulate(bins: StepBins, part: str) -> Table:
    return [[each.get_mean(replica, part) for each in bins.bins] for replica in sorted(bins.replicas)]


def _to_microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(1e6 * seconds)


def _find_top(values: Sequence[float]) -> float:
    """Returns the upper end of a scale for the values."""
    return min(max(values), _MOST_MEDIANS * median(values)) or max(values)


def _render_map(part: str, rows: Table, devices: Sequence[str]) -> str:
    top = _find_top([value for row in rows for value in row if value is not None]) or 1e-9

    def choose_level(value: float | None) -> int:
        return 0 if value is None else 1 + min(NUM_LEVELS - 1, int((NUM_LEVELS - 1) * value / top))

    picture = encode_levels([[choose_level(value) for value in row] for row in rows])
    labels = "".join(f"<span>{escape(name)}</span>" for name in devices)
    scale = f'<span class="scale">0 <i></i> {format_seconds(top)} or more</span>'
    return (
        f'<div class="map" data-part="{part}"><p class="axis">{part}, per step {scale}</p><div class="plot wide">'
        f'<div class="rows">{labels}</div><div class="area cells" data-map="{part}" tabindex="0" '
        f'style="--rows:{len(devices)}"><img src="{picture}" alt="Time of {part} for each device and step"></div>'
        "</div></div>"
    )


def _render_axis(bins: StepBins) -> str:
    first, covered = bins.first_step, bins.num_steps
    ticks = "".join(
        f'<span style="left:{100 * (tick - first + 0.5) / covered:.2f}%">{tick:,}'
        f"<small>{format_elapsed(bins.get_start((tick - first) // bins.width))}</small></span>"
        for tick in choose_integer_ticks(first, bins.last_step)
    )
    return f'<div class="x timed">{ticks}</div>'


def _render_markers(bins: StepBins, events: Sequence[RunEvent]) -> str:
    """Returns a mark for each event; events of one kind in one bin share it."""
    grouped: dict[tuple[str, int], list[str]] = {}
    for event in events:
        index = min(max(event.step - bins.first_step, 0) // bins.width, len(bins.bins) - 1)
        text = f"{event.text} (step {event.step:,}, {format_elapsed(event.seconds)})"
        grouped.setdefault((event.kind, index), []).append(text)
    for index, each in enumerate(bins.bins):
        if each.num_saves:
            step = bins.first_step + index * bins.width
            plural = f"{each.num_saves} checkpoints" if each.num_saves > 1 else "a checkpoint"
            grouped[("checkpoint", index)] = [f"{plural} at step {step:,}" + (" and after" if bins.width > 1 else "")]
    marks = "".join(
        f'<span class="mark {kind}" style="left:{100 * (index + 0.5) / len(bins.bins):.2f}%" '
        f'title="{escape("; ".join(texts[:3]))}"></span>'
        for (kind, index), texts in grouped.items()
        if kind != "notice"
    )
    kinds = [kind for kind in ("lost", "joined", "left", "checkpoint") if any(each == kind for each, _ in grouped)]
    legend = "".join(f'<span class="mark {kind}"></span>{kind}' for kind in kinds)
    return f'<div class="legend marks">{legend}</div><div class="events">{marks}</div>' if kinds else ""


def _render_breakdown(bins: StepBins, replicas: Sequence[int]) -> tuple[str, dict[str, list[float]]]:
    """Returns the stacked parts of a step over the bins as HTML, and the values."""
    bars: dict[str, list[float]] = {name: [] for name in BARS}
    for each in bins.bins:
        present = [replica for replica in replicas if replica in each.parts]
        for part in PARTS:
            means = [each.get_mean(replica, part) or 0.0 for replica in present]
            bars[part].append(sum(means) / max(len(present), 1))
        for pause in PAUSES:
            bars[pause].append(each.pauses.get(pause, 0.0) / max(each.num_steps, 1))
    tops: list[list[float]] = []
    heights = [0.0] * len(bins.bins)
    shown = [name for name in BARS if any(bars[name])]
    for name in shown:
        heights = [height + value for height, value in zip(heights, bars[name], strict=True)]
        tops.append(heights)
    top = 1.05 * _find_top(heights) or 1e-9
    paths = []
    for name, line in reversed(list(zip(shown, tops, strict=True))):  # the highest first; the lower ones cover it
        steps = "".join(f"V{_place(value, top)}H{index + 1}" for index, value in enumerate(line))
        paths.append(f'<path class="bar {_name_class(name)}" d="M0 1000{steps}V1000Z"/>')
    ticks = [tick for tick in choose_ticks(0.0, top, 3) if tick]
    labels = "".join(f'<span style="top:{100 - 100 * tick / top:.2f}%">{format_seconds(tick)}</span>' for tick in ticks)
    grid = "".join(f'<path class="grid" d="M0 {_place(tick, top)}H{len(bins.bins)}"/>' for tick in ticks)
    legend = "".join(f'<span class="key bar {_name_class(name)}">{name}</span>' for name in shown)
    html = (
        f'<div class="legend parts">{legend}</div><div class="y">{labels}</div><div class="area bars" data-bars="" '
        f'tabindex="0"><svg viewBox="0 0 {len(bins.bins)} 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="The parts of a step over the steps">{"".join(paths)}{grid}</svg></div>'
    )
    return html, bars


def _place(value: float, top: float) -> int:
    return max(0, round(1000 - 1000 * value / top))


def _name_class(name: str) -> str:
    return name.split(" ")[0]


def render_totals(bins: StepBins, devices: Sequence[str]) -> str:
    """Returns a table with the time that each device has spent in each part of the steps."""
    columns = ("compute", "exchange", "update", "input")
    rows = []
    for name, replica in zip(devices, sorted(bins.replicas), strict=True):
        own = [each.parts[replica] for each in bins.bins if replica in each.parts]
        seconds = [sum(parts.get(part, 0.0) for parts in own) for part in columns]
        total, num_steps = sum(seconds) or 1e-9, sum(parts[STEPS] for parts in own)
        cells = "".join(
            f"<td>{format_seconds(value / max(num_steps, 1))} <small>{value / total:.0%}</small></td>"
            for value in seconds
        )
        stack = "".join(
            f'<i class="{part}" style="width:{100 * value / total:.1f}%"></i>'
            for part, value in zip(columns, seconds, strict=True)
            if len(devices) <= _MOST_STACKS
        )
        rows.append(
            f'<tr><th>{escape(name)}</th><td>{num_steps:,.0f}</td>{cells}<td><div class="stack">{stack}</div></td></tr>'
        )
    head = "".join(f"<th>{part}</th>" for part in columns)
    return (
        f'<div class="scroll"><table><thead><tr><th>device</th><th>steps</th>{head}<th></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
