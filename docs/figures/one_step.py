"""Draw one step on two devices as an SVG: `python docs/figures/one_step.py` writes one_step.svg beside this file.

Time goes from left to right, and each device has a lane: its shards, their gradients, the sum, the update.
"""

import sys
from pathlib import Path

from shards import COLORS, STYLE, text

SHARDS = 8
WIDTH, HEIGHT = 800, 206
LANE, TOP, BOX = 84, 44, 52  # the distance of two lanes, the first, a box's height
CELL = 20
GREY = "#6b7280"
ADD, UPDATE = 438, 622  # where the sum and the update begin


def draw() -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        '<title id="title">One step on two devices: split, compute, all-reduce, the same update</title>',
        f"<style>\n{STYLE}\n</style>",
        text(8, 20, "1. split the batch"),
        text(206, 20, "2. a gradient per shard"),
        text(ADD, 20, "3. all-reduce"),
        text(UPDATE, 20, "4. the same update"),
        box(ADD, TOP, 140, LANE + BOX, GREY),
        text(ADD + 70, TOP + 58, "8 gradients,", "on", "middle"),
        text(ADD + 70, TOP + 74, "added in one tree;", "on", "middle"),
        text(ADD + 70, TOP + 90, "the sum to both", "on", "middle"),
    ]
    for device in range(2):
        parts += draw_lane(device, TOP + device * LANE, COLORS[device])
    return "\n".join([*parts, "</svg>", ""])


def draw_lane(device: int, y: int, color: str) -> list[str]:
    """Return what one device does."""
    parts = []
    middle = y + BOX // 2
    for index in range(SHARDS // 2):
        x, shard = 8 + index * (CELL + 3), device * SHARDS // 2 + index
        parts += [box(x, middle - CELL // 2, CELL, CELL, color), text(x + 10, middle + 4, str(shard), "on", "middle")]
    return [
        *parts,
        arrow(104, 146, middle),
        box(150, y, 242, BOX, color),
        text(271, middle - 4, f"device {device}: its replica of the model", "on", "middle"),
        text(271, middle + 14, "forward and backward, shard by shard", "on", "middle"),
        arrow(396, ADD - 4, middle),
        arrow(ADD + 144, UPDATE - 4, middle),
        box(UPDATE, y, 170, BOX, color),
        text(UPDATE + 85, middle - 4, f"device {device}: optimizer step", "on", "middle"),
        text(UPDATE + 85, middle + 14, "replicas stay equal", "on", "middle"),
    ]


def box(x: int, y: int, width: int, height: int, color: str) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{color}"/>'


def arrow(x: int, end: int, y: int) -> str:
    """Return an arrow to the right."""
    return f'<path class="line" d="M{x} {y} H{end} m-6 -4 l6 4 l-6 4"/>'


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    target.write_text(draw(), encoding="utf-8")
