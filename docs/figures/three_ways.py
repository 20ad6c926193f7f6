"""Draw the ways to split work as an SVG: `python docs/figures/three_ways.py` writes three_ways.svg beside this file.

Each panel has a network of four layers above its batch. The color says which of two devices computes a part.
"""

import sys
from pathlib import Path

from shards import COLORS, STYLE, text

LAYERS, EXAMPLES = 4, 8
WIDTH, HEIGHT = 800, 268
PANEL, LEFT, TOP = 200, 20, 62
LAYER, ROW, CELL = 120, 36, 15  # a layer's width, the distance of two layers, an example's width
BATCH = TOP + LAYERS * ROW + 8
ONE, BOTH = COLORS[:1], COLORS[:2]


def draw() -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        '<title id="title">One device, network partitioning, layerwise partitioning, data parallelism</title>',
        f"<style>\n{STYLE}\n</style>",
    ]
    panels = [
        ("one device", "", lambda layer: ONE, "every example"),
        ("network partitioning", "pipeline parallelism", lambda layer: COLORS[int(layer >= 2) :][:1], "every example"),
        ("layerwise partitioning", "tensor parallelism", lambda layer: BOTH, "every example"),
    ]
    for index, (name, modern, find_colors, below) in enumerate(panels):
        left = LEFT + index * PANEL
        parts += [text(left, 20, name), text(left, 38, modern, "small")]
        parts += draw_network(left, LAYER, find_colors)
        parts += draw_batch(left, EXAMPLES, "#6b7280")
        parts.append(text(left, BATCH + 38, below, "small"))
    left = LEFT + len(panels) * PANEL
    parts += [text(left, 20, "data parallelism"), text(left, 38, "Lockstep", "small")]
    for device, color in enumerate(BOTH):
        start = left + device * 80
        parts += draw_network(start, 68, lambda layer, color=color: [color])
        parts += draw_batch(start, EXAMPLES // 2, color)
        parts.append(text(start, BATCH + 38, "half of them", "small"))
    return "\n".join([*parts, "</svg>", ""])


def draw_network(left: int, width: int, find_colors) -> list[str]:
    """Return the layers from bottom to top, each in equal parts of its colors, and a line into each."""
    parts = []
    for layer in range(LAYERS):
        y = TOP + (LAYERS - 1 - layer) * ROW
        colors = find_colors(layer)
        part = width / len(colors)
        for index, color in enumerate(colors):
            x = left + index * part
            parts.append(f'<rect x="{x:g}" y="{y}" width="{part - 2:g}" height="24" rx="4" fill="{color}"/>')
            middle = x + part / 2 - 1
            parts.append(f'<path class="line" d="M{middle:g} {y + ROW - 2} V{y + 25}"/>')
    return parts


def draw_batch(left: int, examples: int, color: str) -> list[str]:
    """Return a row of examples."""
    return [
        f'<rect x="{left + index * CELL}" y="{BATCH}" width="{CELL - 2}" height="{CELL}" rx="2" fill="{color}"/>'
        for index in range(examples)
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(draw(), encoding="utf-8")
