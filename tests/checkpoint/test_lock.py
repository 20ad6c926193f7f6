"""One holder at a time, however it ends."""

import subprocess
import sys

import pytest

from lockstep.checkpoint import lock

fcntl = pytest.importorskip("fcntl")


def test_one_at_a_time(tmp_path):
    for _ in range(2):
        with lock.held(tmp_path / "lock") as mine:
            assert mine
            with lock.held(tmp_path / "lock") as other:
                assert not other
            with lock.held(tmp_path / "lock") as other:  # the second did not let go of the first's
                assert not other


def test_let_go_by_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), lock.held(tmp_path / "lock"):
        raise ZeroDivisionError
    with lock.held(tmp_path / "lock") as mine:
        assert mine


def test_a_file_removed_before_it_was_locked(tmp_path, monkeypatch):
    """Whoever sweeps a folder away holds its lock, removes the file, and lets go."""
    flock = fcntl.flock

    def swept(descriptor, operation):
        (tmp_path / "lock").unlink(missing_ok=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", swept)
    with lock.held(tmp_path / "lock") as mine:
        assert not mine


FORK = """
import os, sys
from pathlib import Path
from lockstep.checkpoint import lock
ours, theirs = os.pipe()
with lock.held(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
with lock.held(Path(sys.argv[1])) as mine:
    print(mine)
os.close(theirs)
os.waitpid(child, 0)
"""


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """It has the same open file; a DataLoader's worker may outlive the save."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "lock")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout == "True\n"
