"""Measure how fast shards leave a replica that becomes three times slower: `python benchmarks/slow_replica.py`.

Three replicas of a small numpy network, whose shards take their time by sleeping, so that the cores do not decide. The
times are those of the worker's steps with all that Lockstep adds. In the middle of the run one worker's shards begin to
take three times as long. After 50 steps the throughput is compared with that of the best assignment, which another
trainer has from the start.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import load
import numpy as np
import page

import lockstep
from lockstep.backends.numpy import SGD, Dense
from lockstep.core.assignment import Balance

SHARDS, REPLICAS, SLOW = 16, 3, 1
SECONDS = 0.002  # of a shard
FACTOR = 3.0
NUM_BEFORE, NUM_STEPS = 60, 50
BAR = 0.85
GENERATOR = np.random.Generator(np.random.PCG64(0))
BATCH = GENERATOR.standard_normal((SHARDS * 4, 6)), GENERATOR.integers(0, 3, SHARDS * 4)


class SleepyNetwork(Dense):
    """A network whose forward pass sleeps: three times as long in a process whose id is in the file `slow`."""

    def __init__(self, slow: str) -> None:
        super().__init__([6, 8, 3], seed=1)
        self.slow = slow

    def forward(self, x, rng):
        is_slow = Path(self.slow).read_text() == str(os.getpid())
        time.sleep(SECONDS * (FACTOR if is_slow else 1.0))
        return super().forward(x, rng)


@contextmanager
def training(fixed: dict[int, int] | None = None) -> Iterator[tuple[lockstep.Trainer, Path]]:
    """Yield a trainer, and the file that names the slow process; `fixed` is an assignment that never changes."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        slow = Path(folder, "slow")
        slow.touch()
        if fixed is not None:
            stack.enter_context(mock.patch.object(Balance, "choose", return_value=fixed))
        model, optimizer = SleepyNetwork(str(slow)), SGD(0.1)
        trainer = lockstep.wrap(model, optimizer, "cross_entropy", devices=REPLICAS, shards=SHARDS)
        yield stack.enter_context(trainer), slow


def run(trainer: lockstep.Trainer, count: int) -> list[float]:
    """Return the seconds of each of these steps."""
    times = [time.perf_counter()]
    for _ in range(count):
        trainer.step(BATCH, verbose=0)
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


def slow_down(trainer: lockstep.Trainer, slow: Path) -> None:
    """Let the worker's shards take three times as long from now on."""
    slow.write_text(str(trainer.session.processes.pids[SLOW - 1]))


def find_best() -> dict[int, int]:
    """Return how many shards each replica computes if a step is to be as short as can be, with the slow one known."""
    costs = [FACTOR if seat == SLOW else 1.0 for seat in range(REPLICAS)]
    every = itertools.product(range(1, SHARDS), repeat=REPLICAS)
    fitting = [counts for counts in every if sum(counts) == SHARDS]
    best = min(fitting, key=lambda counts: max(count * cost for count, cost in zip(counts, costs, strict=True)))
    return dict(enumerate(best))


def measure(repeats: int, seed: int) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Return the steps of the best assignment, and of each run those before and those after the slowdown."""
    generator = random.Random(seed)
    best, before, after = [], [], []
    for _ in range(repeats):
        with training(find_best()) as (trainer, slow):
            run(trainer, 1)  # until then nobody waits for the workers
            slow_down(trainer, slow)
            run(trainer, 5)
            best += run(trainer, NUM_STEPS)
        with training() as (trainer, slow):
            before.append(run(trainer, NUM_BEFORE + generator.randrange(NUM_STEPS))[5:])
            slow_down(trainer, slow)
            after.append(run(trainer, 2 * NUM_STEPS))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return best, before, after


def count_until_fast(seconds: Sequence[float], limit: float) -> int:
    """Return after how many steps the mean of each ten that follow is at most `limit`; all of them if never."""
    means = [statistics.fmean(seconds[start : start + 10]) for start in range(len(seconds) - 9)]
    slow = [start for start, mean in enumerate(means) if mean > limit]
    return 0 if not slow else (slow[-1] + 1 if slow[-1] + 1 < len(means) else len(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast shards leave a replica that becomes slower.")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which the replica becomes slower")
    parser.add_argument("--page", action="store_true", help="write today's page")
    asked = parser.parse_args()
    before_load, others = load.measure_load(), load.OthersUse()
    best, before, after = measure(asked.repeats, asked.seed)
    best_mean = statistics.fmean(best)
    rows = []
    shares = []
    for index, (undisturbed, slowed) in enumerate(zip(before, after, strict=True)):
        share = best_mean / statistics.fmean(slowed[NUM_STEPS:])
        shares.append(share)
        values = [1000 * statistics.fmean(each) for each in (undisturbed, slowed[:NUM_STEPS], slowed[NUM_STEPS:])]
        steps = count_until_fast(slowed, best_mean / BAR)
        rows.append([f"run {index + 1}", *(f"{value:.1f}" for value in values), f"{100 * share:.0f} %", str(steps)])
    head = ["", "before, ms", f"steps 1-{NUM_STEPS}, ms", f"steps {NUM_STEPS + 1}-{2 * NUM_STEPS}, ms"]
    head += ["of the best throughput", "steps until the bar"]
    counts = "/".join(str(count) for count in find_best().values())
    result = page.table(head, rows)
    even = -(-SHARDS // REPLICAS)
    verdict = (
        f"The best assignment ({counts} of {SHARDS} shards) takes {1000 * best_mean:.1f} ms a step in the mean of "
        f"{len(best)} steps; an even one would compute for {1000 * even * FACTOR * SECONDS:.0f} ms. Steps "
        f"{NUM_STEPS + 1} to {2 * NUM_STEPS} after the slowdown have, in the worst run, {100 * min(shares):.0f} % of "
        f"its throughput; the bar is {100 * BAR:.0f} %: {page.verdict(min(shares), BAR)}."
    )
    print(result, verdict, sep="\n\n")
    during = f"During the run other processes and guests used {others.percent():.1f} % of the cores."
    print(before_load, during)
    if asked.page:
        notes = [
            f"{REPLICAS} replicas, {SHARDS} shards; a shard sleeps {1000 * SECONDS:.0f} ms, in the slow replica "
            f"{FACTOR:g} times that. It becomes slow at a random step. Means of steps.",
            f"{before_load} {during}",
        ]
        command = f"python benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}"
        sections = [f"## Steps before and after\n\n{result}\n\n{verdict}"]
        found = page.versions(("numpy",))
        title = "One of three replicas becomes slower"
        print(f"Wrote {page.write('slow-replica', title, command, sections, notes, found)}")


if __name__ == "__main__":
    main()
