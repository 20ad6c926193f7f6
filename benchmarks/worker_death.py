"""Measure the time from `kill -9` of a process to the next committed step: `python benchmarks/worker_death.py`.

Three ways to train the same LeNet in two processes on two cores take turns: Lockstep; DDP under torchrun, which starts
all processes again from a checkpoint; torchft (`pip install torchft`), which goes on with the survivors. A process is
killed while it computes its part of a step, so the step that is measured is made without it.
"""

import argparse
import itertools
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import load
import page
from timing import Summary

PROGRAM = Path(__file__).with_name("worker_death_programs.py")
NUM_BEFORE = 10  # steps of both processes before a kill
COMPUTING = 0.6  # a kill comes in this first part of a step, in which the shards are computed
TURNS = 2
SECONDS_TO_RECOVER = 90.0
BAR = 0.150  # beside the rest of the step and one step of the survivors


@dataclass(frozen=True)
class Step:
    """A committed step: when, and by how many processes."""

    time: float
    num_processes: int


@dataclass(frozen=True)
class Recovery:
    """One kill."""

    seconds: float  # to the next committed step
    rest: float  # of the step in which it came
    num_processes: int  # of the step after it
    seconds_to_all: float  # until a step had both processes again


@dataclass
class Contender:
    """A way to train: the commands that start it, and what came of its turns."""

    name: str
    commands: Sequence[Sequence[str]]
    background: Sequence[str] = ()  # a command that runs beside it
    environments: Sequence[dict[str, str]] = ({},)
    recoveries: list[Recovery] = field(default_factory=list)
    steps: dict[int, list[float]] = field(default_factory=dict)  # seconds, by number of processes


class Run:
    """A contender's processes, which write a line for each step they commit and each process that may be killed."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.victim = 0
        self._steps: list[Step] = []
        self._rest = b""
        fifo = folder / "steps"
        os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDWR)  # also to write, so that it never ends
        commands = [*([contender.background] if contender.background else []), *contender.commands]
        extra = [*([{}] if contender.background else []), *contender.environments]
        self._log = (folder / "log").open("wb")
        self._processes = [
            subprocess.Popen(
                command,
                env=os.environ | {"BENCH_FOLDER": str(folder)} | more,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
            for command, more in zip(commands, extra, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        os.close(self._fifo)
        self._log.close()

    def next_step(self) -> Step:
        """Return the next committed step."""
        end = time.monotonic() + SECONDS_TO_RECOVER
        while not self._steps:
            ready, _, _ = select.select([self._fifo], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"no step for {SECONDS_TO_RECOVER:.0f} s: {Path(self._log.name).read_text()[-2000:]}"
                )
            *lines, self._rest = (self._rest + os.read(self._fifo, 1 << 16)).split(b"\n")
            for name, *values in (line.split() for line in lines):
                if name == b"step":
                    self._steps.append(Step(float(values[0]), int(values[1])))
                else:
                    self.victim = int(values[0])
        return self._steps.pop(0)


def kill(run: Run, contender: Contender, generator: random.Random) -> None:
    """Wait until both processes have made steps, kill one, and add what came of it."""
    times: list[float] = []
    step = run.next_step()
    while len(times) < NUM_BEFORE + 1 or not run.victim:
        step = run.next_step()
        times = [*times, step.time] if step.num_processes == 2 else []
    before = [end - start for start, end in itertools.pairwise(times)]
    contender.steps.setdefault(2, []).extend(before)
    usual = statistics.median(before)
    delay = generator.uniform(0, COMPUTING) * usual
    time.sleep(max(0.0, step.time + delay - time.monotonic()))
    victim, run.victim = run.victim, 0
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    last = first = run.next_step()
    while first.time < began:
        last = first = run.next_step()
    while (following := run.next_step()).num_processes < 2:
        contender.steps.setdefault(1, []).append(following.time - last.time)
        last = following
    rest = max(0.0, usual - (began - step.time))
    contender.recoveries.append(Recovery(first.time - began, rest, first.num_processes, following.time - began))


def list_contenders() -> list[Contender]:
    """Return those whose packages are installed."""
    python = sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--max-restarts", "1000"]
    found = [
        Contender("Lockstep", [[python, str(PROGRAM), "lockstep"]]),
        Contender("DDP under torchrun", [[*torchrun, "--standalone", "--nproc-per-node", "2", str(PROGRAM), "ddp"]]),
    ]
    if find_spec("torchft") is not None:
        port = 29510
        lighthouse = ["torchft_lighthouse", "--bind", f"[::]:{port}", "--min_replicas", "1", "--quorum_tick_ms", "100"]
        lighthouse += ["--join_timeout_ms", "10000", "--heartbeat_timeout_ms", "1000"]
        lighthouse[0] = str(Path(python).with_name(lighthouse[0]))
        groups = [
            [*torchrun, "--master-port", str(port + 1 + group), "--nproc-per-node", "1", str(PROGRAM), "torchft"]
            for group in range(2)
        ]
        environments = [{"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "REPLICA_GROUP_ID": group} for group in "01"]
        found.append(Contender("torchft", groups, lighthouse, environments))
    return found


def measure(contenders: Sequence[Contender], kills: int, seed: int) -> None:
    """Let the contenders take turns."""
    generator = random.Random(seed)
    for turn in range(TURNS):
        for contender in contenders[:: -1 if turn % 2 else 1]:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                run = stack.enter_context(Run(contender, folder))
                for _ in range(kills // TURNS + (turn < kills % TURNS)):
                    kill(run, contender, generator)
                    recovery = contender.recoveries[-1]
                    print(f"{contender.name}: {1000 * recovery.seconds:.0f} ms", file=sys.stderr, flush=True)


def describe(contender: Contender) -> list[str]:
    """Return a row of the table, in milliseconds."""
    seconds = Summary.of([each.seconds for each in contender.recoveries])
    both = Summary.of([each.seconds_to_all for each in contender.recoveries])
    values = [seconds.mean, seconds.median, seconds.p95, 1000 * statistics.median(contender.steps[2])]
    alone = contender.steps.get(1)
    cells = [f"{value:,.0f}" for value in values] + [f"{1000 * statistics.median(alone):,.0f}" if alone else "–"]
    return [contender.name, str(len(contender.recoveries)), *cells, f"{both.median:,.0f}"]


def judge(contender: Contender) -> str:
    """Return what Lockstep's recoveries took beside the rest of the step and one step of the survivors."""
    alone = statistics.median(contender.steps[1])
    more = [each.seconds - each.rest - alone for each in contender.recoveries]
    found = Summary.of(more)
    return (
        "Lockstep, beside the rest of the step in which the kill came and one step of the survivor "
        f"({1000 * alone:.0f} ms, median): mean {found.mean:.0f} ms, median {found.median:.0f}, p95 {found.p95:.0f}. "
        f"At most {1000 * BAR:.0f} is the bar: {page.verdict(found.p95, 1000 * BAR, above=False)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time from kill -9 to the next committed step.")
    parser.add_argument("--kills", type=int, default=10, help="of each contender")
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--page", action="store_true", help="write today's page")
    asked = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    contenders = [each for each in list_contenders() if asked.only in each.name]
    before, others = load.measure_load(), load.OthersUse()
    measure(contenders, asked.kills, asked.seed)
    head = ["", "kills", "mean, ms", "median, ms", "p95, ms", "step of 2", "step of 1", "until 2 again"]
    result = page.table(head, [describe(each) for each in contenders])
    verdict = "\n\n".join(judge(each) for each in contenders if each.name == "Lockstep")
    print(result, verdict, sep="\n\n")
    during = f"During the run other processes and guests used {others.percent():.1f} % of the cores."
    print(before, during)
    if not asked.page:
        return
    raw = {each.name: [1000 * recovery.seconds for recovery in each.recoveries] for each in contenders}
    sections = [
        f"## From `kill -9` to the next committed step\n\n{result}\n\n{verdict}",
        f"## Every kill, in ms\n\n```\n{page.raw(raw, 0)}\n```",
    ]
    notes = [
        "LeNet, batch 256, two processes on two cores. One that computes its part of a step is killed; another is "
        "started in its place, and the next kill comes when both have made steps. A contender's turns alternate.",
        "The last three columns are medians in ms: a step of two processes, one of the process that is left, and the "
        "time from the kill to the first step that has two again.",
        "Lockstep: `devices=2` and default arguments. The step after the kill is the step in which it came, over the "
        "whole batch, with the same bits.",
        "DDP under torchrun (Gloo): saves a checkpoint in every step, so that no step is lost; all processes start "
        "again and load it.",
        "torchft: the step in which the kill came is dropped, and the next one has the survivor's half of a batch. Its "
        "lighthouse runs with `--heartbeat_timeout_ms 1000`; the default of 5000 makes it slower.",
        f"{before} {during}",
    ]
    if len(contenders) < 3:
        notes.append("torchft was not installed, or not asked for.")
    command = f"python benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}"
    versions = page.versions(("torch", "torchft", "numpy"))
    title = "A worker dies: Lockstep, torchrun's restart and torchft"
    print(f"Wrote {page.write('worker-death', title, command, sections, notes, versions)}")


if __name__ == "__main__":
    main()
