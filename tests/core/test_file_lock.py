"""Locks on open files: shared and exclusive, and released however their process ends."""

import fcntl
import os
import subprocess
import sys

import pytest

from lockstep.core import file_lock
from lockstep.core.file_lock import hold_lock


def test_a_file_has_one_exclusive_lock_or_several_shared_ones(tmp_path):
    first, second = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert file_lock.lock_exclusive(first)
    assert not file_lock.lock_exclusive(second)
    file_lock.lock_shared(first)
    assert not file_lock.lock_exclusive(second)
    file_lock.lock_shared(second)
    os.close(first)
    assert file_lock.lock_exclusive(second)
    os.close(second)


def test_an_open_file_that_was_renamed_has_its_path_no_more(tmp_path):
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    assert file_lock.has_path(descriptor, path)
    path.rename(tmp_path / "other")
    assert not file_lock.has_path(descriptor, path)
    path.touch()
    assert not file_lock.has_path(descriptor, path)
    os.close(descriptor)


def test_a_lock_is_held_once_at_a_time(tmp_path):
    for _ in range(2):
        with hold_lock(tmp_path / "lock") as first:
            assert first
            with hold_lock(tmp_path / "lock") as second:
                assert not second
            with hold_lock(tmp_path / "lock") as third:  # leaving the second block did not release the first lock
                assert not third


def test_a_lock_is_released_by_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), hold_lock(tmp_path / "lock"):
        raise ZeroDivisionError
    with hold_lock(tmp_path / "lock") as is_locked:
        assert is_locked


def test_a_file_that_is_removed_before_it_is_locked_gives_no_lock(tmp_path, monkeypatch):
    """A process that removes a leftover folder holds its lock, removes the file, and releases the lock."""
    flock = fcntl.flock

    def remove_then_lock(descriptor, operation):
        (tmp_path / "lock").unlink(missing_ok=True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    with hold_lock(tmp_path / "lock") as is_locked:
        assert not is_locked


FORK = """
import os, sys
from pathlib import Path
from lockstep.core.file_lock import hold_lock
ours, theirs = os.pipe()
with hold_lock(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
with hold_lock(Path(sys.argv[1])) as is_locked:
    print(is_locked)
os.close(theirs)
os.waitpid(child, 0)
"""


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """It has the same open file; a DataLoader's worker may outlive the save."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "lock")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout == "True\n"
