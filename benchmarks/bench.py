"""Measures Lockstep against DDP on this machine: `make bench`.

Two cores are enough. All sides are started once and then take turns, block by
block, so that whatever the machine does meanwhile happens to all of them.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack

import adding
import page
import peers
from bookkeeping import STEP
from models import CASES

from lockstep.core.plan import default_shards

SECTIONS = [*CASES, "exchange", "bookkeeping"]
EXCHANGE_TARGET = 4.0
BOOKKEEPING_TARGET = 5.0
NOTES = [
    "Every figure is a median over rounds. In a round each peer makes one block of steps, in turn, while the others "
    "wait on a pipe; the order is turned around from round to round. A few steps before each block are not timed.",
    "Ratios are medians of the rounds' own ratios. In brackets: first and third quartile.",
    "Data: 16,384 random images of 1×28×28 in memory. DDP's ranks index their half of each shuffled batch out of a "
    "tensor; Lockstep does what `fit((x, y))` does. SGD with momentum, cross-entropy.",
    "One thread in each process of Lockstep and DDP; two in the plain process.",
]


def throughput(name: str, rounds: int) -> str:
    """Samples per second of Lockstep, DDP and the plain loop, as a section of the page."""
    case = CASES[name]
    default = default_shards(case.batch_size, 2)
    with ExitStack() as stack:
        sides = [peers.lockstep(name, 2), peers.ddp(name), peers.plain(name)]
        if default != 2:
            sides.append(peers.lockstep(name, None))
        for side in sides:
            stack.enter_context(side)
        for side in sides:
            side.ready()
        speeds: dict[str, list[float]] = {side.name: [] for side in sides}
        for index in range(rounds):
            for side in sides[:: -1 if index % 2 else 1]:
                speeds[side.name].append(case.steps * case.batch_size / side.ask(str(case.steps)))
    ddp = speeds["DDP (Gloo)"]
    ratios = {side: [own / other for own, other in zip(values, ddp, strict=True)] for side, values in speeds.items()}
    rows = [
        [
            side.replace("default shards", f"default shards ({default})"),
            f"{page.median(values):,.0f}",
            page.spread(values),
            f"{page.median(ratios[side]):.2f} ({page.spread(ratios[side], 2)})",
        ]
        for side, values in speeds.items()
    ]
    reached = page.median(ratios["Lockstep, 2 shards"])
    return "\n\n".join(
        [
            f"## {case.title}, batch {case.batch_size}",
            page.table(["2 cores", "samples/s", "quartiles", "against DDP"], rows),
            f"Lockstep with 2 replicas and 2 shards against DDP: {reached:.2f}×, of {case.target}× asked for: "
            f"{page.verdict(reached, case.target)}. {rounds} rounds of {case.steps} steps. Samples/s, round by round:",
            f"```\n{page.raw(speeds, 0)}\n```",
        ]
    )


def exchanged(rounds: int) -> str:
    """Milliseconds to add 44 MB between two processes, as a section of the page."""
    times = adding.measure(3 * rounds)
    ratios = [theirs / ours for ours, theirs in zip(times["shared"], times["gloo"], strict=True)]
    reached = page.median(ratios)
    names = {"shared": "Lockstep, shared memory", "gloo": "Gloo all-reduce"}
    rows = [[names[way], f"{page.median(values):.1f}", page.spread(values, 1)] for way, values in times.items()]
    return "\n\n".join(
        [
            "## Exchange of 44 MB of float32 between 2 processes",
            page.table(["2 processes, one host", "ms", "quartiles"], rows),
            f"Lockstep is {reached:.1f} ({page.spread(ratios, 1)}) times faster, of {EXCHANGE_TARGET} asked for: "
            f"{page.verdict(reached, EXCHANGE_TARGET)}. Both barriers of a step are in Lockstep's time. "
            "Milliseconds, round by round:",
            f"```\n{page.raw(times, 1)}\n```",
        ]
    )


def booked(steps: int) -> str:
    """The pieces of a LeNet step, as a section of the page."""
    done = subprocess.run(
        [sys.executable, "bookkeeping.py", str(steps)], cwd=page.HERE, stdout=subprocess.PIPE, text=True, check=True
    )
    pieces: dict[str, float] = json.loads(done.stdout)
    beside = pieces.pop("worker: unpack")
    whole = sum(pieces.values())
    share = 100 * (whole - sum(pieces[piece] for piece in STEP) + beside) / whole
    rows = [[piece, f"{value:.3f}", f"{100 * value / whole:.2f}"] for piece, value in pieces.items()]
    rows.append(["(worker, beside: unpack)", f"{beside:.3f}", f"{100 * beside / whole:.2f}"])
    return "\n\n".join(
        [
            "## Input and bookkeeping of a LeNet step, 2 replicas",
            page.table(["piece", "ms a step", "%"], rows),
            f"All but {', '.join(STEP)}: {share:.2f} % of a step, under {BOOKKEEPING_TARGET} % asked for: "
            f"{page.verdict(share, BOOKKEEPING_TARGET, above=False)}. Mean of {steps} steps.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Lockstep against DDP on this machine.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="some sections; no page")
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds (pairs), at least 10 for a page")
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores > 2:  # the figures are those of two cores, whatever the machine has
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    load = page.Load()
    sections = []
    for name in asked.only:
        if name == "exchange":
            text = exchanged(asked.rounds)
        elif name == "bookkeeping":
            text = booked(100)
        else:
            text = throughput(name, asked.rounds)
        print(f"{text}\n", flush=True)
        sections.append(text)
    others = load.percent()
    print(f"Other processes and guests used {others:.1f} % of the cores meanwhile.")
    if asked.only == SECTIONS and asked.rounds >= 10:
        command = " ".join(["python benchmarks/bench.py", *sys.argv[1:]])
        notes = [*NOTES, f"Other processes and guests used {others:.1f} % of the cores meanwhile."]
        print(f"Wrote {page.write('cpu', 'Lockstep and DDP on two CPU cores', command, sections, notes)}")


if __name__ == "__main__":
    main()
