"""The dated page: who, what, on which hardware, with which versions, by which command, and the raw numbers."""

import os
import platform
import resource
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as a markdown table, the first column to the left and the numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = f"| {' | '.join(['-' * widths[0], *('-' * (width - 1) + ':' for width in widths[1:])])} |"
    return "\n".join([line(head), rule, *map(line, rows)])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The first and third quartile."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:,.{digits}f} – {high:,.{digits}f}"


def raw(numbers: Mapping[str, Sequence[float]], digits: int) -> str:
    """Every number measured, in the order of the rounds."""
    return "\n".join(
        f"{name}: {' '.join(f'{value:.{digits}f}' for value in values)}" for name, values in numbers.items()
    )


def verdict(value: float, target: float, above: bool = True) -> str:
    return "reached" if (value >= target if above else value < target) else "MISSED"


class Load:
    """How much of the cores went to processes that are not ours, or to other guests of the host."""

    def __init__(self) -> None:
        self._start = self._now()

    def percent(self) -> float:
        """The share of all cores; true once all our processes have ended."""
        whole, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, 100 * (busy - own) / whole)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        fields = [int(field) / TICKS for field in Path("/proc/stat").read_text().split()[1:9]]
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return sum(fields), sum(fields) - fields[3] - fields[4], own  # less idle and waiting for disks


def hardware() -> list[str]:
    """The processor, its cores and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "no AVX")
    return [
        f"{model}, {len(os.sched_getaffinity(0))} cores, {widest}, {gigabytes:.0f} GiB of memory",
        f"Linux {platform.release()}, {'a virtual machine' if 'hypervisor' in flags else 'no virtual machine'}",
    ]


def versions() -> list[tuple[str, str]]:
    """What was measured, and on what it ran."""
    found = [("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"), ("lockstep", _installed("lockstep-train"))]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "../src"], cwd=HERE, capture_output=True, text=True)
    if commit.returncode == 0:
        found.append(("commit", commit.stdout.strip() + (", with changes" if dirty.stdout else "")))
    found.append(("Python", platform.python_version()))
    return found + [(name, _installed(name)) for name in ("torch", "tensorflow-cpu", "numpy", "cloudpickle")]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from the source tree" if name == "lockstep-train" else "not installed"


def write(name: str, title: str, command: str, sections: Sequence[str], notes: Sequence[str]) -> Path:
    """The page of today under that name, written anew where there is one."""
    path = HERE / f"{datetime.now(UTC):%Y-%m-%d}-{name}.md"
    parts = [
        f"# {title}",
        "By the Lockstep contributors.",
        "## Hardware\n\n" + "\n".join(f"- {line}" for line in hardware()),
        "## Versions and date\n\n" + table(["what", "version"], versions()),
        f"## Command\n\n```\n{command}\n```",
        *sections,
        "## Notes\n\n" + "\n".join(f"- {note}" for note in notes),
    ]
    path.write_text("\n\n".join(parts) + "\n")
    return path
