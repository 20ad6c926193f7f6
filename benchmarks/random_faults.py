"""Makes worker processes fail at random points of the protocol and writes what came of it: `make chaos`.

LOCKSTEP_CHAOS_FAULTS is the number of faults, 500 unless set; LOCKSTEP_CHAOS_SEED repeats a run. The harness is that of
tests/chaos: it ends this program with an error if a step is lost or made twice, if a bit differs, if an end is not said
in one line or if a descriptor is left open.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import page

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from chaos.harness import SECONDS_TO_STOP, STEPS, Chaos, Undisturbed, draw_faults

DEVICES = (2, 3, 4)
FAULTS_OF_A_RUN = 25  # then other processes are started


@dataclass
class Totals:
    """What came of all runs."""

    runs: int = 0
    steps: int = 0
    lost: int = 0  # negative if more were made than asked for
    left_behind: int = 0  # processes


def measure(num_faults: int, seed: int) -> tuple[dict[tuple[str, str], list[float]], Totals]:
    """Return the seconds from each fault to the end of the next step, by point and kind; and the totals."""
    generator = random.Random(seed)
    undisturbed = Undisturbed()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    count, totals = 0, Totals()
    while count < num_faults:
        devices = DEVICES[count // FAULTS_OF_A_RUN % len(DEVICES)]
        with tempfile.TemporaryDirectory() as folder, Chaos(folder, devices, undisturbed) as chaos:
            end = min(num_faults, count + FAULTS_OF_A_RUN)
            while count < end:
                faults = draw_faults(generator, devices)
                chaos.order_later(*faults)
                chaos.check_faults(*(fault.kind for fault in faults))
                for point, kind, seconds in chaos.take_recoveries():
                    found[point, kind].append(seconds)
                count += len(faults)
                print(f"\r{count} faults", end="", file=sys.stderr)
            totals.steps += (made := chaos.trainer.session.run.step)
            totals.lost += chaos.epochs * STEPS - made
        totals.runs += 1
        totals.left_behind += sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    print(file=sys.stderr)
    return found, totals


def describe(name: str, values: list[float]) -> list[str]:
    """Return a row of the table, in milliseconds."""
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    numbers = (statistics.mean(values), statistics.median(values), p95)
    return [name, str(len(values)), *(f"{1000 * number:.1f}" for number in numbers)]


def main() -> None:
    num_faults = int(os.environ.get("LOCKSTEP_CHAOS_FAULTS", "500"))
    seed = int(os.environ.get("LOCKSTEP_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"LOCKSTEP_CHAOS_SEED={seed}")
    began = time.monotonic()
    found, totals = measure(num_faults, seed)
    seconds = time.monotonic() - began
    head = ["faults", "mean, ms", "median, ms", "p95, ms"]
    tables = []
    for index, title in ((0, "point"), (1, "kind")):
        groups: dict[str, list[float]] = defaultdict(list)
        for names, values in found.items():
            groups[names[index]] += values
        rows = [describe(name, values) for name, values in sorted(groups.items())]
        tables.append(
            f"## From the fault to the end of the next step, by {title}\n\n{page.table([title, *head], rows)}"
        )
    total = sum(map(len, found.values()))
    result = page.table(
        ["what", "number"],
        [
            ["faults", f"{total}"],
            ["runs", f"{totals.runs}"],
            ["steps made", f"{totals.steps:,}"],
            ["steps lost", f"{totals.lost}"],
            ["processes left behind", f"{totals.left_behind}"],
            ["seconds", f"{seconds:.0f}"],
        ],
    )
    path = page.write(
        "chaos",
        "Random faults in worker processes",
        f"LOCKSTEP_CHAOS_FAULTS={num_faults} LOCKSTEP_CHAOS_SEED={seed} make chaos",
        [f"## Result\n\n{result}", *tables],
        [
            "A small dense network of numpy on 2, 3 and 4 replicas, 8 shards; each run is compared by its digest with "
            "one on one device after every one to six faults; the program ends with an error if they differ.",
            f"A process that stops (SIGSTOP) is ended after {SECONDS_TO_STOP} s without an answer here, and by default "
            "after 60 s or more. The times include that.",
            "Points of `start` and `prove` are passed by a process that is to replace another. No step waits for it.",
        ],
        page.versions(("numpy", "cloudpickle")),
    )
    print(path)


if __name__ == "__main__":
    main()
