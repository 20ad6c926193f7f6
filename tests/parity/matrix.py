"""The parity matrix: framework × case × devices, as the test run counted it.

A parity test records how many of its steps gave the one device's bits. The table
is printed at the end of the run, also where a test failed.
"""

from collections.abc import Iterable
from typing import NamedTuple

# The order of the rows. A framework shows once one of its parity tests has run.
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow", "keras", "mxnet")


class Entry(NamedTuple):
    """One case on one number of devices: how many steps had equal bits, of how many, in how many seconds."""

    framework: str
    case: str
    shards: int
    devices: int
    equal: int
    total: int
    seconds: float
    recorded: str = "none"  # whether the bits are those of the recorded table: "equal", "other", or "none" to compare


def table(entries: Iterable[Entry]) -> list[str]:
    """The lines of the table: a row per framework and case, a column per number of devices.

    >>> for line in table([Entry("numpy", "dense", 4, 1, 3, 3, 0.01), Entry("numpy", "dense", 4, 2, 3, 3, 0.25)]):
    ...     print(line)
    framework  case   shards  1 device       2 devices
    numpy      dense  4       3 of 3, 0.0 s  3 of 3, 0.2 s
    """
    cells: dict[tuple[str, str, int], dict[int, str]] = {}
    for entry in sorted(entries, key=lambda entry: FRAMEWORKS.index(entry.framework)):
        row = cells.setdefault((entry.framework, entry.case, entry.shards), {})
        row[entry.devices] = f"{entry.equal} of {entry.total}, {entry.seconds:.1f} s"
    columns = sorted({devices for row in cells.values() for devices in row})
    rows = [["framework", "case", "shards", *(f"{count} device{'s' * (count > 1)}" for count in columns)]]
    rows += [[*map(str, key), *(row.get(count, "") for count in columns)] for key, row in cells.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
