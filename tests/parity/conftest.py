"""Parity runs end with the matrix: what was compared, how often it was equal, how long it took."""

import pytest

from parity.matrix import Entry, table

ENTRIES = pytest.StashKey[list[Entry]]()


@pytest.fixture(scope="session")
def matrix(request):
    """The entries of this test run."""
    return request.config.stash.setdefault(ENTRIES, [])


def pytest_terminal_summary(terminalreporter, config):
    entries = config.stash.get(ENTRIES, [])
    if entries:
        unequal = sum(entry.total - entry.equal for entry in entries)
        terminalreporter.section("parity: steps with the bits of one device, seconds")
        for line in table(entries):
            terminalreporter.write_line(line)
        known = [entry.recorded for entry in entries]
        terminalreporter.write_line(
            f"bits as recorded: {known.count('equal')} of {len(known)}, not recorded for this machine: "
            f"{known.count('none')}",
            red="other" in known,
        )
        terminalreporter.write_line("every step equal" if not unequal else f"{unequal} steps differ", red=bool(unequal))
