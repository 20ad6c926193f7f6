"""The page of a report, put together from its parts. Everything that comes from the run is escaped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from lockstep.display.report.ticks import format_elapsed
from lockstep.display.report.time_plots import RunEvent

# Nothing is loaded from anywhere, whatever the names of metrics may contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_TABS = (("compute", True), ("exchange", False), ("update", False), ("input", False))


def render_page(title: str, status: str, sections: Iterable[tuple[str, str]], data: Mapping[str, Any]) -> str:
    """Returns the page; a section is a heading and its HTML, `data` has the values that are shown at the pointer."""
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("style.css", "hover.js"))
    body = "".join(f"<section>{f'<h2>{heading}</h2>' if heading else ''}{html}</section>" for heading, html in sections)
    # "<" does not occur in the data, so no name can end the element.
    values = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f'<header><h1>{escape(title)}<span class="status">{escape(status)}</span></h1></header>{body}'
        f'<script type="application/json" id="data">{values}</script><script>{script}</script></body></html>\n'
    )


def render_tabs() -> str:
    """Returns the buttons that choose the part of a step that the heat map shows."""
    tabs = "".join(
        f'<label><input type="radio" name="part" value="{part}"{" checked" * checked}>{part}</label>'
        for part, checked in _TABS
    )
    return f'<fieldset class="tabs">{tabs}</fieldset>'


def render_facts(facts: Mapping[str, str]) -> str:
    """Returns a list of names and values; values without text are left out."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return f"<dl>{rows}</dl>"


def render_epochs(names: Sequence[str], rows: Iterable[tuple[int, Sequence[str], str, str]], note: str) -> str:
    """Returns the table of epochs: number, values, time, and digest."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{epoch + 1:,}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}<td>{seconds}</td>"
        f"<td>{_render_digest(digest)}</td></tr>"
        for epoch, values, seconds, digest in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><th>epoch</th>{head}<th>time</th><th>digest</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div><p><small>{escape(note)}</small></p>"
    )


def _render_digest(digest: str) -> str:
    if not digest:
        return "–"
    return f'<button class="digest" title="a click copies it"><code>{escape(digest)}</code></button>'


def render_plan(owners: Sequence[int], devices: Mapping[int, str]) -> str:
    """Returns a strip with the shards of a batch; adjacent shards of one device are one part with the device's name."""
    runs, shard = [], 0
    for replica, group in groupby(owners):
        length = len(list(group))
        shards = f"shard {shard}" if length == 1 else f"shards {shard} to {shard + length - 1}"
        name = escape(devices.get(replica, f"replica {replica}"))
        runs.append(
            f'<span class="c{replica % 6}" style="flex:{length}" title="{shards} on {name}">{name}: {shards}</span>'
        )
        shard += length
    return f'<div class="plan">{"".join(runs)}</div>'


def render_log(events: Sequence[RunEvent]) -> str:
    """Returns the list of events, such as checkpoints and lost workers."""
    items = "".join(
        f"<li><time>{format_elapsed(event.seconds)}, step {event.step:,}</time><span>{escape(event.text)}</span></li>"
        for event in events
    )
    return f'<ol class="log">{items}</ol>'
