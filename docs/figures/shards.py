"""Draw the one idea as an SVG: `python docs/figures/shards.py` writes shards.svg beside this file.

A batch is cut into eight shards, whose gradients are added in one tree. The three panels differ in the color alone,
which says what each of 1, 2 and 4 devices computes.
"""

import sys
from pathlib import Path

from lockstep.core.tree import fold

SHARDS, DEVICES = 8, (1, 2, 4)
COLORS = ("#3b82f6", "#e8833a", "#2a9d6f", "#a868d8")
CELL, GAP, PANEL, LEFT = 26, 3, 268, 8
TOP, ROW = 74, 34
WIDTH, HEIGHT = LEFT * 2 + PANEL * len(DEVICES) - 38, 262
STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #1f2937; }
  .small { font-size: 11px; fill: #4b5563; }
  .on { fill: #ffffff; font-size: 11px; }
  .line { stroke: #6b7280; stroke-width: 1.3; fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb; } .small { fill: #9ca3af; } .on { fill: #ffffff; } .line { stroke: #9ca3af; }
  }"""


def draw() -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        '<title id="title">A batch in 8 shards, added in the same tree on 1, 2 and 4 devices</title>',
        f"<style>\n{STYLE}\n</style>",
    ]
    for index, devices in enumerate(DEVICES):
        parts += draw_panel(LEFT + index * PANEL, devices)
    return "\n".join([*parts, "</svg>", ""])


def draw_panel(left: int, devices: int) -> list[str]:
    """Return the tree over all shards, in the colors of the devices."""
    width = SHARDS * (CELL + GAP) - GAP
    parts = [
        text(left, 20, f"{devices} device{'s' * (devices > 1)}"),
        text(left, 42, "one batch, 8 shards", "small"),
    ]
    nodes = []
    for shard in range(SHARDS):
        x, color = left + shard * (CELL + GAP) + CELL / 2, COLORS[shard * devices // SHARDS]
        parts.append(
            f'<rect x="{x - CELL / 2:g}" y="{TOP - 22}" width="{CELL}" height="{CELL}" rx="4" fill="{color}"/>'
        )
        parts.append(text(x, TOP - 5, str(shard), "on", "middle"))
        nodes.append((x, TOP + 4, color))

    def add(one: tuple[float, float, str], other: tuple[float, float, str]) -> tuple[float, float, str]:
        (x1, y1, color), (x2, y2, _) = one, other
        x, y = (x1 + x2) / 2, max(y1, y2) + ROW
        parts.append(f'<path class="line" d="M{x1:g} {y1:g} L{x:g} {y - 9:g} L{x2:g} {y2:g}"/>')
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{color}"/>')
        parts.append(text(x, y + 4, "+", "on", "middle"))
        return x, y + 9, color

    x, y, _ = fold(nodes, add)  # Lockstep's own tree
    parts.append(f'<path class="line" d="M{x:g} {y:g} V{y + 18:g}"/>')
    parts.append(text(left + width / 2, y + 36, "the gradient: the same bits", "", "middle"))
    return parts


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return one line of text."""
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{words}</text>'


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(draw(), encoding="utf-8")
