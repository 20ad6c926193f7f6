"""Markdown tables, and the dated page: hardware, versions, the exact command, and the raw numbers."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table, the first column to the left and the numbers to the right."""
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
    """Return the first and third quartile."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:,.{digits}f} – {high:,.{digits}f}"


def raw(numbers: Mapping[str, Sequence[float]], digits: int) -> str:
    """Return every number, in the order of the rounds."""
    return "\n".join(
        f"{name}: {' '.join(f'{value:.{digits}f}' for value in values)}" for name, values in numbers.items()
    )


def verdict(value: float, target: float, above: bool = True) -> str:
    return "reached" if (value >= target if above else value < target) else "MISSED"


def hardware() -> list[str]:
    """Return the processor, its cores and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "no AVX")
    return [
        f"{model}, {len(os.sched_getaffinity(0))} cores, {widest}, {gigabytes:.0f} GiB of memory",
        f"Linux {platform.release()}, {'a virtual machine' if 'hypervisor' in flags else 'no virtual machine'}",
    ]


def versions(packages: Sequence[str] = ("torch", "tensorflow-cpu", "numpy", "cloudpickle")) -> list[tuple[str, str]]:
    """Return what was measured, and on what it ran."""
    result = [("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"), ("lockstep", _installed("lockstep-train"))]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    dirty = subprocess.run(["git", "status", "--porcelain", "../src"], cwd=HERE, capture_output=True, text=True)
    if commit.returncode == 0:
        result.append(("commit", commit.stdout.strip() + (", with changes" if dirty.stdout else "")))
    result.append(("Python", platform.python_version()))
    return result + [(name, _installed(name)) for name in packages]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from the source tree" if name == "lockstep-train" else "not installed"


def write(
    name: str,
    title: str,
    command: str,
    sections: Sequence[str],
    notes: Sequence[str],
    found: Sequence[tuple[str, str]] | None = None,
) -> Path:
    """Write today's page under that name, over an earlier one of today; `found` are the versions."""
    path = HERE / f"{datetime.now(UTC):%Y-%m-%d}-{name}.md"
    parts = [
        f"# {title}",
        "By the Lockstep contributors.",
        "## Hardware\n\n" + "\n".join(f"- {line}" for line in hardware()),
        "## Versions and date\n\n" + table(["what", "version"], versions() if found is None else found),
        f"## Command\n\n```\n{command}\n```",
        *sections,
        "## Notes\n\n" + "\n".join(f"- {note}" for note in notes),
    ]
    path.write_text("\n\n".join(parts) + "\n")
    return path
