"""What a shard costs beyond its own arithmetic, in PyTorch: `python benchmarks/shard_cost.py`, under a minute.

The model is that of `lockstep demo`, an MLP so small that whatever a step does besides arithmetic shows. Everything
runs in this process, on one thread: the plain loop, gradients accumulated by hand over as many parts as Lockstep has
shards, and `trainer.step`. With accuracy, each sums up loss and accuracy as tensors and reads them at the end of a
turn, and Lockstep's logs are read after every step; without, nobody reads anything.

On a busy machine use `--cpu`: it counts the CPU time of the thread, which other processes change by what they leave in
the caches, but not by their turns. The number of Python functions that a step calls is the same on any machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import load
import page
import torch
from timing import Summary, interleave, time_steps
from torch import Tensor, nn, optim

import lockstep
from lockstep.datasets import digits

BATCH, SHARDS = 256, 8
BARS = [  # Lockstep's row, the row by hand, and what the ratio of their means shall not exceed
    (f"Lockstep, {SHARDS} shards", f"accumulation, {SHARDS} parts", 1.35),
    (f"Lockstep, {SHARDS} shards, accuracy", f"accumulation, {SHARDS} parts, accuracy", 1.25),
    ("Lockstep, 1 shard", "plain step", 1.20),
    ("Lockstep, 1 shard, accuracy", "plain step, accuracy", 1.20),
]
NOTES = [
    f"The MLP 64-128-10 of `lockstep demo` with batch norm and dropout, digits, batches of {BATCH}, SGD with momentum.",
    "Every step is timed on its own: mean, median and p95 (nearest rank) are of steps. In a round each row makes steps "
    "for about --seconds, in turn, and the order is reversed from round to round. The first tenth of a turn is not "
    "counted.",
    "With accuracy: the rows by hand sum up loss and accuracy as tensors and read them at the end of a turn; "
    "Lockstep's logs are read after every step.",
]


@dataclass(frozen=True)
class Steps:
    """A contender: a function that makes one step."""

    step: Callable[[], object]
    finish: Callable[[], object] = lambda: None
    least_warm: int = 3
    clock: Callable[[], float] = time.perf_counter

    def take_turn(self, warm: int, count: int) -> list[float]:
        """Time steps of this process."""
        return time_steps(self.step, self.finish, warm, count, self.clock)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Give the whole batches of the training data without end."""
    inputs, targets = map(torch.from_numpy, digits()[0])
    pairs = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    return cycle([pair for pair in pairs if len(pair[0]) == BATCH])


def trained() -> tuple[nn.Module, optim.Optimizer, nn.Module]:
    """Return the demo's model, its optimizer and its loss."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    return net, optim.SGD(net.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()


def by_hand(parts: int, accuracy: bool) -> Steps:
    """Return the loop that people write; with several parts, it accumulates their gradients."""
    net, optimizer, criterion = trained()
    source, size = batches(), BATCH // parts
    losses, hits = torch.tensor(0.0), torch.tensor(0)

    def step() -> None:
        inputs, targets = next(source)
        optimizer.zero_grad()
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            outputs = net(x)
            loss = criterion(outputs, y)
            (loss / parts if parts > 1 else loss).backward()
            if accuracy:
                losses.add_(loss.detach())
                hits.add_((outputs.argmax(1) == y).sum())
        optimizer.step()

    def finish() -> None:
        torch.stack([losses, hits.double()]).tolist()

    return Steps(step, finish)


def with_lockstep(shards: int, accuracy: bool) -> Steps:
    """Return `trainer.step` on one device."""
    metrics = ["accuracy"] if accuracy else []
    trainer = lockstep.wrap(*trained(), metrics=metrics, devices=1, shards=shards, threads=1)
    source = batches()

    def step() -> None:
        logs = trainer.step(next(source), verbose=0)
        if accuracy:
            dict(logs)

    step()
    assert trainer.devices == ("cpu:0",), trainer.devices
    assert f" {shards} shard{'' if shards == 1 else 's'} of " in trainer.opening, trainer.opening
    return Steps(step)


def count_calls(step: Callable[[], object]) -> int:
    """Return how many Python functions a step calls, PyTorch's own among them."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def build_rows(clock: Callable[[], float]) -> dict[str, Steps]:
    """Return the contenders, timed by this clock."""
    rows = {}
    for suffix, accuracy in (("", False), (", accuracy", True)):
        rows[f"plain step{suffix}"] = by_hand(1, accuracy)
        rows[f"accumulation, {SHARDS} parts{suffix}"] = by_hand(SHARDS, accuracy)
        rows[f"Lockstep, 1 shard{suffix}"] = with_lockstep(1, accuracy)
        rows[f"Lockstep, {SHARDS} shards{suffix}"] = with_lockstep(SHARDS, accuracy)
    return {name: replace(row, clock=clock) for name, row in rows.items()}


def describe(found: dict[str, list[list[float]]], calls: dict[str, int]) -> list[str]:
    """Return the sections of the page: the rows, the ratios, the numbers of the rounds."""
    rows = {name: Summary.of([each for turn in turns for each in turn]) for name, turns in found.items()}
    times = [
        [name, f"{row.mean:.3f}", f"{row.median:.3f}", f"{row.p95:.3f}", str(calls[name])] for name, row in rows.items()
    ]
    ratios = []
    for ours, theirs, bar in BARS:
        mean, median = rows[ours].mean / rows[theirs].mean, rows[ours].median / rows[theirs].median
        verdict = page.verdict(mean, bar, above=False)
        ratios.append([f"{ours} / {theirs}", f"{mean:.2f}", f"{median:.2f}", f"{bar:.2f}", verdict])
    means = {name: [1000 * sum(turn) / len(turn) for turn in turns] for name, turns in found.items()}
    head = ["one thread", "mean ms", "median ms", "p95 ms", "Python calls"]
    return [
        f"## Steps of {BATCH} examples\n\n{page.table(head, times)}",
        f"## Ratios\n\n{page.table(['time / time', 'mean', 'median', 'at most', ''], ratios)}",
        f"Mean milliseconds of a step, round by round:\n\n```\n{page.raw(means, 3)}\n```",
    ]


def main() -> None:
    """Measure, print, and write the page if it may be written."""
    parser = argparse.ArgumentParser(description="Measure what a shard costs beyond its own arithmetic.")
    parser.add_argument("--rounds", type=int, default=12, help="each row takes a turn in each")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn")
    parser.add_argument("--cpu", action="store_true", help="count CPU time, for a busy machine")
    parser.add_argument("--page", action="store_true", help="write the dated page, unless the machine is busy")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    before = load.wait_until_quiet() if asked.page else load.measure_load()
    others, started = load.OthersUse(), time.perf_counter()
    rows = build_rows(time.thread_time if asked.cpu else time.perf_counter)
    found = interleave(rows, asked.rounds, asked.seconds)
    sections = describe(found, {name: count_calls(row.step) for name, row in rows.items()})
    percent = others.percent()
    note = (
        f"Before: {before} During the run, of {time.perf_counter() - started:.0f} seconds, other processes and guests "
        f"used {percent:.1f} % of the {os.cpu_count()} cores."
    )
    print("\n\n".join([*sections, note]))
    if asked.page and before.is_quiet and percent <= load.MAX_PERCENT:
        command = " ".join([".venv/bin/python benchmarks/shard_cost.py", *sys.argv[1:]])
        packages = page.versions(("torch", "numpy"))
        title = "PyTorch: what a shard costs beyond its arithmetic"
        print(f"Wrote {page.write('shard-cost', title, command, sections, [*NOTES, note], packages)}")
    elif asked.page:
        print("No page is written, because this machine is busy. Run it again when nothing else runs.")


if __name__ == "__main__":
    main()
