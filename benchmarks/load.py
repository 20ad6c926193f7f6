"""Tell whether this machine is quiet enough for numbers that are kept.

Two figures decide: the share of the cores that was busy during one second in which the benchmark slept, and the load
average of the last minute. A benchmark also looks once its contenders are started and idle, and once it has ended.
"""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAX_PERCENT = 5.0  # of all cores
MAX_AVERAGE = 0.25  # load average, per core
MAX_BUSY_LOOKS = 3
PATIENCE = 300.0  # seconds: what an earlier benchmark leaves in the load average takes two to three minutes to go
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores since the machine started, and those in which they were busy."""

    total: float
    busy: float

    def percent_since(self, before: "CpuTimes", own: float = 0.0) -> float:
        """Return the busy share since `before`, less `own` seconds, in percent."""
        total = self.total - before.total
        return max(0.0, 100 * (self.busy - before.busy - own) / total) if total else 0.0


def parse_cpu_times(text: str) -> CpuTimes:
    """Read the first line of /proc/stat. Time taken by other guests of the host counts as busy.

    >>> parse_cpu_times("cpu  100 0 100 700 100 0 0 0 0 0") == CpuTimes(1000 / TICKS, 200 / TICKS)
    True
    """
    fields = [int(field) / TICKS for field in text.split(None, 9)[1:9]]
    return CpuTimes(sum(fields), sum(fields) - fields[3] - fields[4])  # less idle and waiting for disks


def read_cpu_times() -> CpuTimes:
    """Read /proc/stat."""
    return parse_cpu_times(Path("/proc/stat").read_text().splitlines()[0])


@dataclass(frozen=True)
class Load:
    """How busy the machine is without this benchmark."""

    percent: float  # of all cores, over one second
    average: float  # of the last minute
    cores: int

    @property
    def in_use(self) -> bool:
        """Whether other programs are using the cores now."""
        return self.percent > MAX_PERCENT

    @property
    def is_quiet(self) -> bool:
        """Whether numbers measured now may be kept."""
        return not self.in_use and self.average <= MAX_AVERAGE * self.cores

    def __str__(self) -> str:
        """Say both figures in a sentence."""
        return (
            f"The cores were {self.percent:.1f} % busy over one second, and the load average is {self.average:.2f} "
            f"on {self.cores} cores."
        )


def measure_load(
    seconds: float = 1.0,
    read: Callable[[], CpuTimes] = read_cpu_times,
    sleep: Callable[[float], object] = time.sleep,
    average: Callable[[], float] = lambda: os.getloadavg()[0],
) -> Load:
    """Sleep, and return what the machine did meanwhile."""
    before = read()
    sleep(seconds)
    return Load(read().percent_since(before), average(), os.cpu_count() or 1)


def wait_until_quiet(
    measure: Callable[[], Load] = measure_load,
    sleep: Callable[[float], object] = time.sleep,
    patience: float = PATIENCE,
) -> Load:
    """Return the load once it is quiet, once the cores were in use at three looks, or after `patience` seconds.

    A load average that is high while nothing runs is the past, and is given time to fall. One busy second may be a
    passing one.
    """
    load = measure()
    waited, busy_looks = 0.0, 0
    while not load.is_quiet and waited < patience:
        busy_looks += load.in_use
        if busy_looks == MAX_BUSY_LOOKS:
            break
        sleep(5.0)
        waited += 5.0
        load = measure()
    return load


class OthersUse:
    """How much of the cores went, during a benchmark, to processes that are not its own, or to other guests."""

    def __init__(
        self,
        read: Callable[[], CpuTimes] = read_cpu_times,
        own: Callable[[], float] = lambda: _own_seconds(),
    ) -> None:
        self._read, self._own = read, own
        self._before = read(), own()

    def percent(self) -> float:
        """Return the share of all cores; correct once all processes of the benchmark have ended."""
        before, own = self._before
        return self._read().percent_since(before, self._own() - own)


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
