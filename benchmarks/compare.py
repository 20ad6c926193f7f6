"""Compare Lockstep with a framework's plain loop and with its own data parallelism: the part all frameworks share.

A framework's script says which models there are and which contenders each has. Here they are started, take turns, and
become a table. Rows that Lockstep loses are printed like the others.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import load
import page
from peers import Peer, Turns
from timing import Summary, interleave

from lockstep.core.plan import default_shards

HEAD = ["mean ms", "median ms", "p95 ms", "examples/s (mean)", "× plain (mean)"]
SETTLE = 0.05  # seconds before each turn, in which the threads of the contender before stop spinning
NUM_CORES = 2
# One kind of device for all: with a GPU in the machine the defaults would mean it, and the baselines would not.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
NOTES = [
    "Every step is timed on its own: mean, median and p95 (nearest rank) are of steps. × is examples/s as a multiple "
    "of the faster plain row's, and of the framework's own data parallelism's, from the means. Above 1 is faster.",
    "In a round each row makes steps for about --seconds, in turn, while the others wait on a pipe; the order is "
    "reversed from round to round. The first tenth of a turn is not counted.",
    "All rows take shuffled batches out of arrays in memory, with the same optimizer and batch size, and sum up mean "
    "loss and accuracy. Where threads are not named, they are the framework's (or Lockstep's) default.",
    "`step` is a loop around `trainer.step` that reads loss and accuracy of every step; `fit` is `trainer.fit`, and "
    "what it does at the end of an epoch is in the last step of each turn.",
]


@dataclass(frozen=True)
class Entry:
    """Processes that are measured, with a row for each of their ways to train."""

    label: str
    role: str  # "plain", "own" (the framework's own data parallelism) or "lockstep"
    arguments: Sequence[Sequence[str]]  # of each process, after the script's name
    ways: Sequence[str] = ("step",)

    def rows(self) -> dict[str, str]:
        """Return the way of each row by the row's name."""
        if self.role == "lockstep":
            return {f"{self.label}, `{way}`": way for way in self.ways}
        assert len(self.ways) == 1
        return {self.label: self.ways[0]}


@dataclass(frozen=True)
class Framework:
    """What a framework's script measures."""

    name: str  # of the page
    title: str
    script: str
    own_way: str  # the head of the last column
    packages: Sequence[str]  # whose versions the page gives
    titles: Mapping[str, str]  # of the models
    batch_sizes: Mapping[str, int]
    entries: Callable[[str], Sequence[Entry]]  # by the model's name
    default_models: Sequence[str]
    default_rounds: int


def lockstep_entries(model: str, batch_size: int) -> list[Entry]:
    """Return Lockstep's entries: default arguments, then the settings that people choose. Equal ones appear once."""
    result, seen = [], set()
    for given_devices, given_shards in ((None, None), (1, 1), (2, 2), (2, None)):
        shards = given_shards or default_shards(batch_size, given_devices or 1)
        devices = given_devices or int(shards == 1)  # 0: Lockstep chooses how many, while it trains
        if (devices, shards) in seen:
            continue
        seen.add((devices, shards))
        default = (given_devices, shards) == (2, default_shards(batch_size, 2))
        if given_devices is None:
            label = f"default arguments ({_count(shards, 'shard')})"
        else:
            label = f"{_count(given_devices, 'device')}, {_count(shards, 'shard')}" + " (the default)" * default
        choice = [] if given_devices is None else ["--devices", str(given_devices)]
        choice += [] if given_shards is None or default else ["--shards", str(given_shards)]
        expected = ["--expect", str(devices), str(shards)]
        arguments = ["--serve", "lockstep", model, *choice, *expected]
        result.append(Entry(f"Lockstep, {label}", "lockstep", [arguments], ("step", "fit")))
    return result


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def measure(framework: Framework, model: str, rounds: int, seconds: float) -> tuple[str, load.Load]:
    """Return the section of one model, and the load while its contenders were started and idle."""
    entries = framework.entries(model)
    with ExitStack() as stack:
        peers = []
        for entry in entries:
            commands = [[framework.script, *arguments] for arguments in entry.arguments]
            peers.append(stack.enter_context(Peer(entry.label, commands)))
        for peer in peers:
            peer.ready()
        time.sleep(1.0)
        idle = load.measure_load()
        contenders, roles = {}, {}
        for entry, peer in zip(entries, peers, strict=True):
            for row, way in entry.rows().items():
                contenders[row], roles[row] = Turns(peer, way), entry.role
        steps = interleave(contenders, rounds, seconds, lambda: time.sleep(SETTLE))
    return section(framework, model, steps, roles), idle


def section(framework: Framework, model: str, steps: Mapping[str, list[list[float]]], roles: Mapping[str, str]) -> str:
    """Return the table and the raw numbers of one model."""
    batch_size = framework.batch_sizes[model]
    summaries = {row: Summary.of(list(chain.from_iterable(turns))) for row, turns in steps.items()}

    def fastest(role: str) -> float:
        return min(summary.mean for row, summary in summaries.items() if roles[row] == role)

    rows = [
        [
            row,
            f"{summary.mean:,.2f}",
            f"{summary.median:,.2f}",
            f"{summary.p95:,.2f}",
            f"{1000 * batch_size / summary.mean:,.0f}",
            f"{fastest('plain') / summary.mean:.2f}",
            f"{fastest('own') / summary.mean:.2f}",
        ]
        for row, summary in summaries.items()
    ]
    rounds = {
        f"{row} ({summaries[row].num_steps} steps)": [1000 * statistics.fmean(turn) for turn in turns]
        for row, turns in steps.items()
    }
    return "\n\n".join(
        [
            f"## {framework.titles[model]}, batch {batch_size}",
            page.table([f"{NUM_CORES} cores", *HEAD, f"× {framework.own_way} (mean)"], rows),
            "Mean milliseconds of a step, round by round:",
            f"```\n{page.raw(rounds, 2)}\n```",
        ]
    )


def main(framework: Framework) -> None:
    """Measure the models that are asked for, print their tables, and write the page if it may be written."""
    parser = argparse.ArgumentParser(description=f"Measure Lockstep on {framework.title}, on two CPU cores.")
    names = list(framework.titles)
    parser.add_argument("--models", nargs="+", choices=names, default=list(framework.default_models))
    parser.add_argument("--rounds", type=int, default=framework.default_rounds, help="each row takes a turn in each")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn; a step that takes longer is a turn")
    parser.add_argument("--page", action="store_true", help="write the dated page, unless the machine is busy")
    asked = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    os.environ.update(ENVIRONMENT, GLOO_SOCKET_IFNAME="lo")
    found = load.wait_until_quiet() if asked.page else load.measure_load()
    print(f"{found}{'' if found.is_quiet else ' This machine is busy: do not believe these numbers.'}\n", flush=True)
    loads, sections, others, started = [found], [], load.OthersUse(), time.perf_counter()
    for name in asked.models:
        text, idle = measure(framework, name, asked.rounds, asked.seconds)
        print(f"{text}\n", flush=True)
        sections.append(text)
        loads.append(idle)
    percent, minutes = others.percent(), (time.perf_counter() - started) / 60
    notes = [
        f"Before: {found} Started and idle, the contenders and everything else used "
        f"{', '.join(f'{each.percent:.1f}' for each in loads[1:])} % of the cores. During the run, of "
        f"{minutes:.1f} minutes, other processes and guests used {percent:.1f} %."
    ]
    print(notes[0])
    busy = not found.is_quiet or percent > load.MAX_PERCENT or any(each.in_use for each in loads)
    if not asked.page:
        return
    if busy:
        print(
            f"No page is written, because this machine is busy: its limits are {load.MAX_PERCENT:.0f} % of the "
            f"cores and a load average of {load.MAX_AVERAGE * found.cores:g}. Run it again when nothing else runs."
        )
        return
    script = Path(framework.script).name
    home = Path(sys.executable).parents[1].name  # .venv or .venv-mxnet, as the Makefile names them
    python = f"{home}/bin/python" if home.startswith(".venv") else "python"
    command = " ".join([f"{python} benchmarks/{script}", *sys.argv[1:]])
    title, versions = f"{framework.title} on two CPU cores", page.versions(framework.packages)
    print(f"Wrote {page.write(framework.name, title, command, sections, [*NOTES, *notes], versions)}")
