"""Identifies this process's host, and reads the cores and memory that its cgroups let this process use."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


@dataclass(frozen=True)
class Host:
    """The cores and the memory that this process may use on its host."""

    num_cores: float  # a quota may allow a part of one
    free_memory: int  # bytes
    process_memory: int  # bytes of this process, and so of each further one


def describe_host() -> str:
    """Returns a text that is equal in two processes if they can reach each other over the loopback interface.

    The text names the running kernel and the process's network namespace: each container of a host may have its own.
    """
    words = [platform.node()]
    with suppress(OSError):
        words += [(_PROC / "sys/kernel/random/boot_id").read_text().strip(), os.readlink(_PROC / "self/ns/net")]
    return " ".join(words)


def read_host(cgroup: Path = _CGROUP, proc: Path = _PROC) -> Host:
    """Returns the number of cores that this process may use, and the memory that is free for it and that it uses."""
    groups = _list_groups(cgroup, proc)
    return Host(_read_cores(groups), _read_free_memory(groups, proc), _read_process_memory(proc))


def _list_groups(cgroup: Path, proc: Path) -> list[Path]:
    """Returns the folders of this process's cgroups and of their parent groups, whose limits apply as well.

    Version 2 of cgroups has one hierarchy, version 1 has one for each resource. In a container the process's own group
    may be mounted as the root, while /proc shows the group's path on the host, which has no folder in the container.
    """
    groups = {cgroup}
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for root in controllers.split(",") if controllers else ("", "unified"):
            groups.update(cgroup / root / each for each in (own, *own.parents))
    return sorted(groups)


def _read_cores(groups: Iterable[Path]) -> float:
    """Returns the number of cores in this process's affinity mask, or less if a cgroup's quota allows less."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in groups:
        quota, _, period = _read_text(group / "cpu.max").partition(" ")
        quota = quota or _read_text(group / "cpu.cfs_quota_us")
        period = period or _read_text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def _read_free_memory(groups: Iterable[Path], proc: Path) -> int:
    available = _read_numbers(proc / "meminfo").get("MemAvailable:", 0) * 1024
    return min([available, *(free for group in groups if (free := _read_free_memory_of_group(group)) is not None)])


def _read_free_memory_of_group(group: Path) -> int | None:
    """Returns the memory that a group may still use; None without a limit. The kernel's file cache counts as free."""
    limit = _read_text(group / "memory.max") or _read_text(group / "memory.limit_in_bytes")
    used = _read_text(group / "memory.current") or _read_text(group / "memory.usage_in_bytes")
    if not limit.isdigit() or not used.isdigit():
        return None
    found = _read_numbers(group / "memory.stat")
    cached = found.get("total_inactive_file", found.get("inactive_file", 0))  # version 1 has its own part beside it
    return int(limit) - int(used) + cached


def _read_process_memory(proc: Path) -> int:
    fields = _read_text(proc / "self" / "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def _read_numbers(path: Path) -> dict[str, int]:
    """Returns the integers of a file in which each line has a name and a number."""
    lines = (line.split() for line in _read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # another kind of cgroup, or none
        return ""
