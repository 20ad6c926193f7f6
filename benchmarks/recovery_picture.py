"""Draws docs/recovery.svg: what happens when a worker is killed in the middle of a step, from the trace of such a run.

    python benchmarks/recovery_picture.py              trains, kills a worker, and draws the trace
    python benchmarks/recovery_picture.py run.json     draws this trace, of a run in which one worker was lost

Needs PyTorch.
"""

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import lockstep

PICTURE = Path(__file__).parents[1] / "docs" / "recovery.svg"
NUM_DEVICES, NUM_SHARDS, KILLED_STEP = 3, 6, 12
STEPS_BEFORE, STEPS_AFTER = 1, 1  # that are shown around the killed one, and after the new process has joined

WIDTH, LEFT, TOP, LANE, GAP = 900, 66, 58, 34, 8
SHARD_COLORS = ("#3a7bd5", "#2f9e8f", "#d9822b", "#c05fa8", "#7a8f2f", "#8a63d2")
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1c2126 }
  .soft { fill: #5c6670 } .shard { fill: #fff; font-weight: 600; text-anchor: middle }
  .lane { fill: #8892a0; opacity: .12 } .exchange { fill: #8892a0; opacity: .45 } .update { fill: #5c6670 }
  .lost { fill: url(#stripes); stroke: #d0352f } .killed { stroke: #d0352f; stroke-width: 3; stroke-linecap: round }
  .red { fill: #c02a25; font-weight: 600 } .green { fill: #1f8a4c; font-weight: 600 } .rule { stroke: #8892a0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e8ec } .soft { fill: #9aa6b2 } .red { fill: #ff7b72 } .green { fill: #5cc08c }
    .update { fill: #b4bfca }
  }
"""


def record(path: Path) -> None:
    """Trains on three CPU devices; kills a worker while it computes, and goes on until another replaces it."""
    import torch
    from torch import nn

    class KillOne(lockstep.Callback):
        """Kills the second device's process in the middle of a step; stops the run when another has joined."""

        joined = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            pids = self.trainer.session.processes.pids
            if self.trainer.num_steps == KILLED_STEP:
                self.seconds = 0.35 * self.trainer.session.processes.member.compute_seconds
                threading.Timer(self.seconds, os.kill, (pids[0], signal.SIGKILL)).start()
            elif self.trainer.num_steps > KILLED_STEP and len(pids) == NUM_DEVICES - 1:
                self.joined += 1
                self.trainer.stop_training = self.joined > STEPS_AFTER + 2

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    x, y = torch.randn(3072, 784), torch.randint(10, (3072,))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    with lockstep.wrap(net, sgd, nn.CrossEntropyLoss(), devices=["cpu"] * NUM_DEVICES, shards=NUM_SHARDS) as trainer:
        trainer.fit((x, y), epochs=2000, batch_size=3072, callbacks=[KillOne()], trace=path, verbose=0)


def draw(events: Sequence[dict[str, Any]]) -> str:
    """Returns the picture of the steps around the loss, and of those in which another process joins."""
    slices = [event for event in events if event["ph"] == "X" and "step" in event["args"]]
    lanes = {
        event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"
    }
    lost = next(each for each in slices if each["name"].startswith("lost"))
    step = lost["args"]["step"]
    joined = min(each["args"]["step"] for each in slices if each["tid"] == lost["tid"] and each["args"]["step"] > step)
    parts = [range(step - STEPS_BEFORE, step + 2), range(joined - 1, joined + STEPS_AFTER)]
    shown = [[each for each in slices if each["args"]["step"] in part and is_drawn(each)] for part in parts]
    spans = [(min(each["ts"] for each in part), max(each["ts"] + each["dur"] for each in part)) for part in shown]
    scale = (WIDTH - LEFT - 44) / sum(end - start for start, end in spans)
    bottom = TOP + len(lanes) * (LANE + GAP)
    body, x = [], float(LEFT)
    for (start, end), part in zip(spans, shown, strict=True):

        def place(time: float, x: float = x, start: float = start) -> float:
            return x + scale * (time - start)

        width = scale * (end - start)
        body += [
            f'<rect class="lane" x="{x:.1f}" y="{TOP + lane * (LANE + GAP)}" width="{width:.1f}" height="{LANE}"/>'
            for lane in range(len(lanes))
        ]
        body += [draw_slice(each, place) for each in part]
        body += draw_steps(part, place, lost, joined, bottom)
        x += width + 30
    middle = LEFT + scale * (spans[0][1] - spans[0][0]) + 15
    body.append(f'<path class="rule" d="M{middle - 4:.1f} {TOP - 6}l8 -8m-2 8l8 -8"/>')
    body.append(f'<text class="soft" x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">later</text>')
    names = [
        f'<text x="8" y="{TOP + index * (LANE + GAP) + 22}">{escape(name)}</text>'
        for index, (_, name) in enumerate(sorted(lanes.items()))
    ]
    keys = [
        ("shard", SHARD_COLORS[0], "a shard, with its number"),
        ("exchange", "", "exchange, commit"),
        ("lost", "", "lost"),
    ]
    legend, x = [], float(LEFT)
    for kind, color, text in keys:
        fill = f'fill="{color}"' if color else f'class="{kind}"'
        legend.append(f'<rect {fill} x="{x}" y="{bottom + 36}" width="16" height="12" rx="2"/>')
        legend.append(f'<text class="soft" x="{x + 22}" y="{bottom + 47}">{text}</text>')
        x += 48 + 7.2 * len(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 58}" role="img" '
        f'aria-label="A worker is killed in step {step}: the others compute its shards in the same step">'
        f'<style>{STYLE}</style><defs><pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#d0352f"/></pattern></defs>\n'
        + "\n".join([*names, *body, *legend])
        + "\n</svg>\n"
    )


def is_drawn(event: dict[str, Any]) -> bool:
    """Returns whether a slice is one of a step, and no pause between two."""
    return event["name"].startswith(("shard", "exchange", "update", "lost"))


def draw_slice(event: dict[str, Any], place: Any) -> str:
    """Returns the rectangle of a slice, a shard with its number."""
    left, right = place(event["ts"]), place(event["ts"] + event["dur"])
    top = TOP + event["tid"] * (LANE + GAP)
    name = event["name"].split()
    box = f'x="{left:.1f}" y="{top}" width="{max(right - left - 0.6, 0.6):.1f}" height="{LANE}" rx="2"'
    if name[0] == "lost":
        mark = f"M{right - 7:.1f} {top + LANE / 2 - 7}l14 14m0 -14l-14 14"
        return f'<rect class="lost" {box}/><path class="killed" d="{mark}"/>'
    if name[0] not in ("shard", "shards"):
        return f'<rect class="{name[0]}" {box}/>'
    again = ' opacity=".45"' if len(name) > 2 else ""
    number = (
        f'<text class="shard" x="{(left + right) / 2:.1f}" y="{top + 22}">{name[1]}</text>' if right - left > 12 else ""
    )
    return f'<rect fill="{SHARD_COLORS[int(name[1]) % 6]}"{again} {box}/>{number}'


def draw_steps(part: Sequence[dict[str, Any]], place: Any, lost: dict[str, Any], joined: int, bottom: int) -> list[str]:
    """Returns a line over each attempt to make a step, with its number and what has happened in it."""
    result = []
    for step, attempt in sorted({(each["args"]["step"], each["args"]["attempt"]) for each in part}):
        own = [each for each in part if (each["args"]["step"], each["args"]["attempt"]) == (step, attempt)]
        left, right = place(min(each["ts"] for each in own)), place(max(each["ts"] + each["dur"] for each in own))
        result.append(f'<path class="rule" d="M{left + 1:.1f} {TOP - 8}H{right - 1:.1f}"/>')
        is_again = step == lost["args"]["step"] and attempt > 1
        text = f"step {step}" + (" again" if is_again else "")
        result.append(f'<text class="soft" x="{left + 1:.1f}" y="{TOP - 14}">{text}</text>')
        said = ""
        if step == lost["args"]["step"]:
            said = "the others compute all shards" if is_again else "killed"
        elif step == joined:
            said = "another process joins"
        if said:
            color = "red" if said == "killed" else "green"
            x, anchor = (WIDTH, "end") if left > 0.75 * WIDTH else (left + 1, "start")
            result.append(f'<text class="{color}" x="{x:.1f}" y="{TOP - 34}" text-anchor="{anchor}">{said}</text>')
    return result


def main(arguments: Sequence[str]) -> None:
    """Records a trace if none is given, and draws it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments[0] if arguments else Path(folder, "run.json"))
        if not arguments:
            record(path)
        PICTURE.write_text(draw(json.loads(path.read_text("utf-8"))), encoding="utf-8")
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
