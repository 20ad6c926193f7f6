"""The cores and the memory that a process may use, read from files."""

import os
import subprocess
import sys

import pytest

from lockstep.launch.host import describe_host, read_host


def test_a_host_is_the_same_for_all_of_its_processes():
    code = "from lockstep.launch.host import describe_host; print(describe_host())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{describe_host()}\n"


@pytest.fixture
def folders(tmp_path):
    """A /proc and a cgroup without limits."""
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    4000 kB\n")
    (proc / "self" / "statm").write_text("9000 10 3 1 0 5 0\n")
    (proc / "self" / "cgroup").write_text("4:memory:/x/y\n1:cpuacct,cpu:/x/y\n0::/a/b\n")
    return cgroup, proc


CORES = len(os.sched_getaffinity(0))
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, CORES, 4_096_000),  # no cgroup
        ({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, CORES, 4_096_000),
        ({"cpu.max": "50000 100000"}, 0.5, 4_096_000),
        ({"cpu.max": "99900000 100000"}, CORES, 4_096_000),  # a quota above the cores
        ({"memory.max": "3000000", "memory.current": "1000000"}, CORES, 2_000_000),
        # Pages of files are given up when memory is needed.
        (
            {"memory.max": "3000000", "memory.current": "2900000", "memory.stat": "file 9\ninactive_file 2000000"},
            CORES,
            2_100_000,
        ),
        # The tightest limit of all groups around it, in any order.
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "20000 100000", "cpu.max": "50000 100000"}, 0.2, 4_096_000),
        ({"a/b/memory.max": "max", "a/memory.max": "500000", "a/memory.current": "200000"}, CORES, 300_000),
        # Version 1, in a container that has its own group in the place of the root, and with two controllers together.
        ({"cpu/cpu.cfs_quota_us": "40000", "cpu/cpu.cfs_period_us": "100000"}, 0.4, 4_096_000),
        ({"cpu/x/y/cpu.cfs_quota_us": "-1", "cpu/x/y/cpu.cfs_period_us": "100000"}, CORES, 4_096_000),
        (
            {
                "memory/x/memory.limit_in_bytes": "3000000",
                "memory/x/memory.usage_in_bytes": "1000000",
                "memory/x/memory.stat": "inactive_file 5\ntotal_inactive_file 400000",
                "memory/x/y/memory.limit_in_bytes": "9223372036854771712",
                "memory/x/y/memory.usage_in_bytes": "1000000",
            },
            CORES,
            2_400_000,
        ),
    ],
)
def test_limits_of_a_cgroup(folders, files, cores, memory):
    cgroup, proc = folders
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text + "\n")
    host = read_host(cgroup, proc)
    assert (host.num_cores, host.free_memory, host.process_memory) == (cores, memory, 10 * PAGE)


def test_this_host():
    host = read_host()
    assert host.num_cores > 0
    assert host.free_memory > 0
    assert host.process_memory > 1 << 20
